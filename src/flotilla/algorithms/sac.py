"""Soft Actor-Critic (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications"), continuous and discrete.

Discrete actions after Christodoulou 2019: expectations over all actions in place of draws.  Departures: densities are
those of actions in [-1, 1], so that the target entropy does not depend on the units of the environment; the
temperature learns from the draws that the actor has just learned from; both critics read an image through one encoder.

Shape legend: B batch, A dimensions of an action or number of choices, K = 2 critics, N environments,
... the shape of one observation or action.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from flotilla.core.ranges import check_ranges
from flotilla.core.types import Obs, Row, Spec, State
from flotilla.functional import polyak
from flotilla.nets.continuous import ActionScale, Critics
from flotilla.nets.distributions import Categorical
from flotilla.nets.encoders import CnnKind, Encoder
from flotilla.nets.layers import as_made, full
from flotilla.run import Run

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
LOG_2, LOG_SQRT_2PI = math.log(2), 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How SAC learns; the defaults are the reference's for MuJoCo."""

    policy_lr: float = 3e-4  # of the actor's Adam
    q_lr: float = 1e-3  # of the critics' Adam and the temperature's
    adam_eps: float = 1e-8  # Adam's epsilon
    buffer_size: int = 1_000_000  # transitions that are kept
    learning_starts: int = 5_000  # environment steps with random actions before learning
    batch_size: int = 256  # transitions a gradient step
    train_frequency: int = 1  # environment steps, all environments together, between rounds of gradient steps
    gradient_steps: int = 1  # of the critics in a round; -1: as many as environment steps
    gamma: float = 0.99  # discount a step
    tau: float = 0.005  # share of the way that the targets go to the critics
    target_frequency: int = 1  # gradient steps between two moves of the targets
    policy_frequency: int = 2  # gradient steps between rounds of the actor, which has as many steps
    autotune: bool = True  # learn the temperature, so that the entropy meets its target
    alpha: float = 0.2  # the temperature where it is not learned; where it is, it begins at 1
    target_entropy: float = -1.0  # nats that the temperature aims at, for each dimension of an action
    target_entropy_scale: float = 0.89  # and where actions are discrete: share of the largest entropy, log(choices)
    hidden_sizes: tuple[int, ...] = (256, 256)  # of the MLPs
    cnn: CnnKind = "nature"  # network on images


class Agent(nn.Module):
    """Actor, two critics, their targets and the temperature."""

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__()
        space = spec.action_space
        self.num_choices = int(space.n) if isinstance(space, gym.spaces.Discrete) else 0
        self.scale = None if self.num_choices else ActionScale(space)
        size = self.num_choices if self.scale is None else 2 * self.scale.dim
        self.encoder = Encoder(spec.obs_space, config.hidden_sizes, config.cnn, torch.relu, as_made)
        self.actor = nn.Linear(self.encoder.output_dim, size)
        self.critics = Critics(
            spec,
            2,
            config.hidden_sizes,
            config.cnn,
            num_actions=0 if self.scale is None else self.scale.dim,
            num_outputs=self.num_choices,
        )
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(0.0 if config.autotune else math.log(config.alpha)))
        if self.scale is None:
            self.target_entropy = config.target_entropy_scale * math.log(self.num_choices)
        else:
            self.target_entropy = config.target_entropy * self.scale.dim

    def policy(self, obs: Obs) -> Categorical | Squashed:
        parameters = full(self.actor(self.encoder(obs)))
        return Categorical(parameters) if self.scale is None else Squashed(*parameters.chunk(2, -1))

    def q(self, obs: Obs, action: Tensor) -> Tensor:
        """What both critics (K, B) say of actions as the environment takes them."""
        if self.scale is not None:
            q_KB: Tensor = self.critics(obs, self.scale.to_unit(action))
            return q_KB
        q_KBA: Tensor = self.critics(obs)
        return q_KBA.gather(-1, action.expand(q_KBA.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def act(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """A draw from the policy; its mode when the module is in eval mode.  Row (N, ...), as it arrives."""
        policy = self.policy(row.obs)
        action = policy.sample() if self.training else policy.mode()
        action = action if self.scale is None else self.scale.to_env(action)
        return action, row.reward.new_zeros(len(action), 0), {}

    def act_at_random(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Any action with equal probability, whatever there is to see."""
        count = len(row.reward)
        if self.scale is None:
            action = torch.randint(self.num_choices, (count,), device=row.reward.device)
        else:
            action = self.scale.uniform(count)
        return action, row.reward.new_zeros(count, 0), {}


class Squashed:
    """The tanh of independent normals, in [-1, 1]; the raw deviation (B, A) is squashed into what is reasonable."""

    def __init__(self, mean_BA: Tensor, raw_BA: Tensor) -> None:
        self.mean = mean_BA
        self.log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (raw_BA.tanh() + 1)

    def mode(self) -> Tensor:
        return self.mean.tanh()

    def sample(self) -> Tensor:
        return torch.addcmul(self.mean, self.log_std.exp(), torch.randn_like(self.mean)).tanh()

    def sample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Actions (B, A) with gradients to the parameters, and the log of their density (B,)."""
        noise = torch.randn_like(self.mean)
        x = torch.addcmul(self.mean, self.log_std.exp(), noise)
        # log(1 - tanh(x)^2) is 2 (log 2 - x - softplus(-2 x)), which is exact where tanh(x) rounds to 1.
        squeeze = 2 * (LOG_2 - x - softplus(-2 * x))
        return x.tanh(), -(0.5 * noise.square() + self.log_std + LOG_SQRT_2PI + squeeze).sum(-1)


def soft_value(agent: Agent, critics: Critics, obs: Obs) -> tuple[Tensor, Tensor]:
    """min Q - alpha log pi (B,) of the policy's actions, and log pi (B,); expectations where actions are discrete."""
    policy, alpha = agent.policy(obs), agent.log_alpha.detach().exp()
    if isinstance(policy, Categorical):
        p_BA = policy.log_p.exp()
        value_B = (p_BA * (critics(obs).amin(0) - alpha * policy.log_p)).sum(-1)
        return value_B, (p_BA * policy.log_p).sum(-1)
    action_BA, log_prob_B = policy.sample_with_log_prob()
    return critics(obs, action_BA).amin(0) - alpha * log_prob_B, log_prob_B


def critic_loss(agent: Agent, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared soft Bellman residual, of both critics (Haarnoja et al. 2018, eq. 5 and 6)."""
    with torch.no_grad():
        next_value_B, _ = soft_value(agent, agent.targets, batch["next_obs"])
        target_B = batch["reward"] + batch["discount"] * next_value_B
    q_KB = agent.q(batch["obs"], batch["action"])
    loss = (q_KB - target_B).square().sum(0).mean()
    return loss, {"critic_loss": loss.detach(), "q_value": q_KB.detach().mean()}


def actor_loss(agent: Agent, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The soft value of the policy, negative (eq. 7, reparameterised as in eq. 9)."""
    value_B, log_prob_B = soft_value(agent, agent.critics, batch["obs"])
    loss = -value_B.mean()
    return loss, {"actor_loss": loss.detach(), "log_prob": log_prob_B.detach()}


def alpha_loss(agent: Agent, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The temperature rises where the entropy is below its target (eq. 18)."""
    alpha = agent.log_alpha.exp()
    loss = -alpha * (batch["log_prob"] + agent.target_entropy).mean()
    return loss, {"alpha_loss": loss.detach(), "alpha": alpha.detach()}


def train(config: Config, run: Run) -> Agent:
    check_ranges(config)
    agent = run.place(Agent(run.spec, config))
    actor = [*agent.encoder.parameters(), *agent.actor.parameters()]
    critic_opt = run.optimizer(agent.critics.parameters(), config.q_lr, clip=0.0, eps=config.adam_eps)
    actor_opt = run.optimizer(actor, config.policy_lr, clip=0.0, eps=config.adam_eps)
    alpha_opt = run.optimizer([agent.log_alpha], config.q_lr, clip=0.0, eps=config.adam_eps)
    replay = run.replay(config.buffer_size, gamma=config.gamma)
    batch_size = run.per_rank("batch_size", config.batch_size)
    run.state(agent=agent, critic_opt=critic_opt, actor_opt=actor_opt, alpha_opt=alpha_opt, replay=replay)

    sources, targets = [*agent.critics.parameters()], [*agent.targets.parameters()]
    num_steps = max(1, config.train_frequency // run.config.num_envs)
    for _ in run.ticks():
        # Sample: a few steps of every environment, at random in the beginning.
        act = agent.act if run.env_steps >= config.learning_starts else agent.act_at_random
        replay.add(run.sampler.rollout(act, num_steps))

        # Learn: as many gradient steps as the new environment steps are worth.
        metrics: dict[str, Tensor] = {}
        for update in run.updates(config.gradient_steps, every=config.train_frequency, after=config.learning_starts):
            batch = vars(replay.sample(batch_size))
            terms = critic_opt.step(critic_loss, agent, batch)
            if update % config.policy_frequency == 0:
                for _ in range(config.policy_frequency):
                    actor_terms = actor_opt.step(actor_loss, agent, batch)
                    log_prob = {"log_prob": actor_terms.pop("log_prob")}
                    if config.autotune:
                        actor_terms |= alpha_opt.step(alpha_loss, agent, log_prob)
                metrics = actor_terms | {"entropy": -log_prob["log_prob"].mean()}
            metrics |= terms
            if update % config.target_frequency == 0:
                polyak(targets, sources, config.tau)
        run.log({f"losses/{name}": x for name, x in metrics.items()})
    return agent
