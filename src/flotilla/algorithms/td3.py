"""TD3, Twin Delayed Deep Deterministic policy gradient (Fujimoto et al. 2018).

Departures: networks, noise and its bounds are in [-1, 1], so that they do not depend on the units of the environment;
both critics read an image through one encoder.

Shape legend: B batch, A dimensions of an action, K = 2 critics, N environments, ... the shape of one observation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.core.ranges import check_ranges
from flotilla.core.types import Row, Spec, State
from flotilla.functional import polyak
from flotilla.nets.continuous import ActionScale, Actor, Critics, with_noise
from flotilla.nets.encoders import CnnKind
from flotilla.run import Run


@dataclass(frozen=True, kw_only=True)
class Config:
    """How TD3 learns; the defaults are the reference's for MuJoCo."""

    learning_rate: float = 3e-4  # of Adam, for the actor and the critics
    adam_eps: float = 1e-8  # Adam's epsilon
    buffer_size: int = 1_000_000  # transitions that are kept
    learning_starts: int = 25_000  # environment steps with random actions before learning
    batch_size: int = 256  # transitions a gradient step
    train_frequency: int = 1  # environment steps, all environments together, between rounds of gradient steps
    gradient_steps: int = 1  # of the critics in a round; -1: as many as environment steps
    gamma: float = 0.99  # discount a step
    tau: float = 0.005  # share of the way that the targets go, once per step of the actor
    policy_frequency: int = 2  # gradient steps of the critics for one of the actor
    exploration_noise: float = 0.1  # deviation of the normal noise in training's actions, which reach from -1 to 1
    policy_noise: float = 0.2  # deviation of the noise in the target's actions
    noise_clip: float = 0.5  # and the largest of it
    hidden_sizes: tuple[int, ...] = (256, 256)  # of the MLPs
    cnn: CnnKind = "nature"  # network on images


class Agent(nn.Module):
    """Actor and two critics, and the slow copies of them that make targets."""

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__()
        self.scale = ActionScale(spec.action_space)
        self.exploration_noise = config.exploration_noise
        sizes, dim = config.hidden_sizes, self.scale.dim
        self.actor = Actor(spec, dim, sizes, config.cnn)
        self.critics = Critics(spec, 2, sizes, config.cnn, num_actions=dim)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    def act(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The actor's action with noise; without it when the module is in eval mode.  Row (N, ...), as it arrives."""
        action_NA = self.actor(row.obs)
        if self.training:
            action_NA = with_noise(action_NA, self.exploration_noise)
        return self.scale.to_env(action_NA), row.reward.new_zeros(len(action_NA), 0), {}

    def act_at_random(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Any action with equal probability, whatever there is to see."""
        count = len(row.reward)
        return self.scale.uniform(count), row.reward.new_zeros(count, 0), {}


def critic_loss(agent: Agent, batch: dict[str, Any], config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared Bellman residual of both critics, to the smaller target at an action with noise (algorithm 1)."""
    with torch.no_grad():
        next_BA = with_noise(agent.target_actor(batch["next_obs"]), config.policy_noise, config.noise_clip)
        next_value_B = agent.target_critics(batch["next_obs"], next_BA).amin(0)
        target_B = batch["reward"] + batch["discount"] * next_value_B
    q_KB = agent.critics(batch["obs"], agent.scale.to_unit(batch["action"]))
    loss = (q_KB - target_B).square().sum(0).mean()
    return loss, {"critic_loss": loss.detach(), "q_value": q_KB.detach().mean()}


def actor_loss(agent: Agent, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The first critic's value of the actor's actions, negative (Silver et al. 2014)."""
    loss = -agent.critics(batch["obs"], agent.actor(batch["obs"]))[0].mean()
    return loss, {"actor_loss": loss.detach()}


def train(config: Config, run: Run) -> Agent:
    check_ranges(config)
    agent = run.place(Agent(run.spec, config))
    critic_opt = run.optimizer(agent.critics.parameters(), config.learning_rate, clip=0.0, eps=config.adam_eps)
    actor_opt = run.optimizer(agent.actor.parameters(), config.learning_rate, clip=0.0, eps=config.adam_eps)
    replay = run.replay(config.buffer_size, gamma=config.gamma)
    batch_size = run.per_rank("batch_size", config.batch_size)
    run.state(agent=agent, critic_opt=critic_opt, actor_opt=actor_opt, replay=replay)

    sources = [*agent.actor.parameters(), *agent.critics.parameters()]
    targets = [*agent.target_actor.parameters(), *agent.target_critics.parameters()]
    num_steps = max(1, config.train_frequency // run.config.num_envs)
    for _ in run.ticks():
        # Sample: a few steps of every environment, at random in the beginning.
        act = agent.act if run.env_steps >= config.learning_starts else agent.act_at_random
        replay.add(run.sampler.rollout(act, num_steps))

        # Learn: as many gradient steps as the new environment steps are worth.
        metrics: dict[str, Tensor] = {}
        for update in run.updates(config.gradient_steps, every=config.train_frequency, after=config.learning_starts):
            batch = vars(replay.sample(batch_size))
            terms = critic_opt.step(critic_loss, agent, batch, config)
            if update % config.policy_frequency == 0:
                metrics = actor_opt.step(actor_loss, agent, batch)
                polyak(targets, sources, config.tau)
            metrics |= terms
        run.log({f"losses/{name}": x for name, x in metrics.items()})
    return agent
