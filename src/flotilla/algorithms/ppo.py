"""Proximal Policy Optimization (Schulman et al. 2017), with the details of the reference implementations.

After Huang et al. 2022, "The 37 Implementation Details of PPO".  Departures: time limits are bootstrapped and
the ignored step between two episodes has weight 0 (the row contract); observation and reward statistics are
those of all environments and change between rollouts only, so that acting and learning see the same inputs.

Shape legend: T steps, N environments, B = T * N samples (with a memory: B = N sequences of T), M minibatches,
S state of the memory, ... the shape of one observation or action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from flotilla.core.errors import UsageError
from flotilla.core.ranges import check_ranges
from flotilla.core.types import Obs, Rollout, Row, Spec, State, tree_map
from flotilla.functional import Mean, balanced, explained_variance, gae, standardize, weighted_mean
from flotilla.nets.distributions import Distribution, distribution, parameter_size
from flotilla.nets.encoders import CnnKind, Encoder, ObsNorm, has_image
from flotilla.nets.layers import Memory, MemoryKind, RewardScale, full, orthogonal
from flotilla.run import Run


@dataclass(frozen=True, kw_only=True)
class Config:
    """How PPO learns; the defaults are the reference's for classic control."""

    learning_rate: float = 2.5e-4  # of Adam
    anneal_lr: bool = True  # learning rate linearly to 0 over the run
    adam_eps: float = 1e-5  # Adam's epsilon (baselines' value; PyTorch's is 1e-8)
    num_steps: int = 128  # environment steps per environment and rollout
    gamma: float = 0.99  # discount a step
    gae_lambda: float = 0.95  # trace decay of the advantage estimates
    num_minibatches: int = 4  # gradient steps per pass over a rollout
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # standardise advantages in each minibatch
    clip_coef: float = 0.2  # largest change of the probability ratio that is rewarded
    anneal_clip: bool = False  # clip_coef linearly to 0 over the run
    clip_vloss: bool = True  # clip the change of the value as well, by the same number
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest global norm of the gradient; 0: no clipping
    target_kl: float = 0.0  # end the passes when the policy moved further (nats, k3 estimate); 0: never
    norm_obs: bool = False  # standardise vector observations by running statistics, clipped to +-10
    norm_reward: bool = False  # divide rewards by the running deviation of the discounted return, clipped to +-10
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the MLPs on vector observations
    cnn: CnnKind = "nature"  # network on images; a3c costs a third of nature, impala several times as much
    memory: MemoryKind = "none"  # recurrent layer after the encoder
    memory_size: int = 128  # features of the recurrent layer


class Agent(nn.Module):
    """Policy and value: two MLPs on vectors, as the reference; one shared encoder on images or with a memory."""

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__()
        self.action_space = spec.action_space
        self.norm = ObsNorm(spec.obs_space if config.norm_obs else gym.spaces.Dict())
        self.encoder = Encoder(spec.obs_space, config.hidden_sizes, config.cnn)
        self.memory = Memory(config.memory, self.encoder.output_dim, config.memory_size)
        shared = config.memory != "none" or has_image(spec.obs_space)
        self.critic_encoder = None if shared else Encoder(spec.obs_space, config.hidden_sizes, config.cnn)
        size = parameter_size(spec.action_space)
        self.actor = orthogonal(nn.Linear(self.memory.output_dim, size), 0.01)
        self.critic = orthogonal(nn.Linear(self.memory.output_dim, 1), 1.0)
        is_box = isinstance(spec.action_space, gym.spaces.Box)
        self.log_std = nn.Parameter(torch.zeros(size), requires_grad=is_box) if is_box else torch.zeros(0)

    def forward(self, obs: Obs, state: Tensor, is_first: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        """Policy, value and next state of normalised observations (B, ...); with a memory (B, T, ...)."""
        policy, features, state = self.policy(obs, state, is_first)
        return policy, self.value(obs, features), state

    def policy(self, obs: Obs, state: Tensor, is_first: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        """The policy, what the actor's head reads, and the next state."""
        features = self.encoder(obs)
        if self.memory.cell is not None:
            features, state = self.memory(features, state, is_first)
        return distribution(self.action_space, self.actor(features), self.log_std), features, state

    def value(self, obs: Obs, features: Tensor | None = None) -> Tensor:
        """The value, from the features of the policy or, where the critic has its own encoder, without them."""
        features = features if self.critic_encoder is None else self.critic_encoder(obs)
        return full(self.critic(features).squeeze(-1))

    def act(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """A draw from the policy; its mode when the module is in eval mode.  Row (N, ...), as it arrives."""
        if state is None:
            state = torch.zeros(len(row.reward), self.memory.state_dim, device=row.reward.device)
        obs, is_first = self.norm(row.obs), row.is_first
        if self.memory.cell is not None:
            obs, is_first = tree_map(lambda x: x.unsqueeze(1), obs), is_first.unsqueeze(1)
        policy, features, state = self.policy(obs, state, is_first)
        action = policy.sample() if self.training else policy.mode()
        extras = {"log_prob": policy.log_prob(action)}
        if self.critic_encoder is None:
            extras["value"] = self.value(obs, features)
        if self.memory.cell is not None:
            return action.squeeze(1), state, {name: x.squeeze(1) for name, x in extras.items()}
        return action, state, extras


def loss(agent: Agent, batch: dict[str, Any], config: Config, clip_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, the value loss and the entropy bonus (Schulman et al. 2017, eq. 7 and 9).

    Means are over the samples that count: the weights are 0 for the others, and 1 on average.
    """
    weight, adv = batch["weight"], batch["adv"]
    policy, value, _ = agent(batch["obs"], batch.get("state"), batch["is_first"])
    log_ratio = policy.log_prob(batch["action"]) - batch["log_prob"]
    ratio = log_ratio.exp()
    surrogate = torch.minimum(adv * ratio, adv * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    policy_loss = -weighted_mean(surrogate, weight)

    error = (value - batch["return"]).square()
    if config.clip_vloss:
        clipped = batch["value"] + (value - batch["value"]).clamp(-clip_coef, clip_coef)
        error = torch.maximum(error, (clipped - batch["return"]).square())
    value_loss = 0.5 * weighted_mean(error, weight)

    entropy = weighted_mean(policy.entropy(), weight)
    total = policy_loss - config.ent_coef * entropy + config.vf_coef * value_loss
    terms = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "log_ratio": log_ratio}
    return total, {name: x.detach() for name, x in terms.items()}


@torch.no_grad()
def diagnostics(terms: dict[str, Tensor], weight: Tensor, clip_coef: float) -> dict[str, Tensor]:
    """The metrics of one minibatch; the two estimates of KL(old || new) are k1 and k3 of Schulman 2020."""
    log_ratio = terms.pop("log_ratio")
    ratio = log_ratio.exp()
    terms["old_approx_kl"] = weighted_mean(-log_ratio, weight)
    terms["approx_kl"] = weighted_mean(ratio - 1 - log_ratio, weight)
    terms["clipfrac"] = weighted_mean(((ratio - 1).abs() > clip_coef).float(), weight)
    return {f"losses/{name}": x for name, x in terms.items()}


def check(config: Config, run: Run) -> None:
    """Refuse numbers out of range and sizes that do not divide, before anything is made."""
    check_ranges(config)
    count, unit = run.num_envs * config.num_steps, "samples (environments x num_steps)"
    if config.memory != "none":
        count, unit = run.num_envs, "environments (sequences, with a memory)"
    if config.num_minibatches < 1 or count % config.num_minibatches:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        fits = min(divisors, key=lambda n: abs(n - config.num_minibatches))
        raise UsageError(f"num_minibatches={config.num_minibatches} does not divide {count} {unit}; nearest: {fits}")


def samples(agent: Agent, roll: Rollout, config: Config) -> tuple[dict[str, Any], Tensor]:
    """A rollout as B samples to learn from, and the explained variance of its values.

    Single steps (T * N, ...), or whole sequences (N, T, ...) for a memory.
    """
    rows, obs_T1N = roll.rows, agent.norm(roll.rows.obs)
    if agent.critic_encoder is None:  # they came with the actions, as they share the costly part
        last_value_N = agent.act(rows.at(-1), roll.last_state)[2]["value"]
        value_T1N = torch.cat([roll.extras["value"], last_value_N[None]])
    else:  # one large batch costs less than T small ones
        value_T1N = agent.value(obs_T1N)
    adv_TN, value_TN = gae(rows, value_T1N, config.gamma, config.gae_lambda), value_T1N[:-1]
    batch: dict[str, Any] = {
        "obs": tree_map(lambda x_T1N: x_T1N[:-1], obs_T1N),
        "is_first": rows.is_first[:-1],
        "action": roll.action,
        "log_prob": roll.extras["log_prob"],
        "value": value_TN,
        "adv": adv_TN,
        "return": adv_TN + value_TN,
        "weight": (~rows.is_last[:-1]).float(),  # 0 where the action was ignored; shapes stay fixed
    }
    explained = explained_variance(value_TN, batch["return"], batch["weight"])
    if config.memory == "none":
        return tree_map(lambda x_TN: x_TN.flatten(0, 1), batch), explained
    return tree_map(lambda x_TN: x_TN.transpose(0, 1), batch) | {"state": roll.first_state}, explained


def shuffled(batch: dict[str, Any], config: Config, mean: Mean) -> Iterator[dict[str, Any]]:
    """The samples in a new order, in equal minibatches; their weights and advantages are relative to the minibatch.

    A minibatch has the parts of all ranks: `mean` is over them, so that many ranks learn as one would.
    """
    order_B = torch.randperm(len(batch["adv"]), device=batch["adv"].device)
    parts = tree_map(lambda x: torch.unflatten(x[order_B], 0, (config.num_minibatches, -1)), batch)
    parts["weight"] = balanced(parts["weight"], mean)
    if config.norm_adv:
        parts["adv"] = standardize(parts["adv"], parts["weight"], mean)
    parts = tree_map(lambda x: x.unbind(), parts)
    for m in range(config.num_minibatches):
        yield tree_map(lambda minibatches: minibatches[m], parts)  # noqa: B023


def train(config: Config, run: Run) -> Agent:
    check(config, run)
    agent = run.place(Agent(run.spec, config))
    opt = run.optimizer(agent.parameters(), config.learning_rate, clip=config.max_grad_norm, eps=config.adam_eps)
    reward_scale = run.place(RewardScale(run.num_envs, config.gamma))
    run.state(agent=agent, opt=opt, reward_scale=reward_scale)

    for progress in run.ticks():
        learning_rate = config.learning_rate * (1 - progress) if config.anneal_lr else config.learning_rate
        clip_coef = config.clip_coef * (1 - progress) if config.anneal_clip else config.clip_coef
        opt.set_lr(learning_rate)

        # Sample: T steps of every environment with the policy as it is now.
        roll = run.sampler.rollout(agent.act, config.num_steps)
        with torch.no_grad():
            if config.norm_reward:
                roll = roll.with_reward(reward_scale(roll.rows.reward, roll.rows.is_first, run.moments))
            batch, explained = samples(agent, roll, config)
            agent.norm.update(run.moments, roll.rows)

        # Learn: several passes over the same samples.
        for epoch in range(1, config.update_epochs + 1):  # noqa: B007
            for minibatch in shuffled(batch, config, run.mean):
                terms = opt.step(loss, agent, minibatch, config, clip_coef)
            metrics = diagnostics(terms, minibatch["weight"], clip_coef)
            if config.target_kl > 0 and run.mean(metrics["losses/approx_kl"]) > config.target_kl:
                break

        run.log(metrics | {"losses/explained_variance": explained, "losses/epochs": epoch})
        run.log({"charts/learning_rate": learning_rate})
    return agent
