"""DDPG, Deep Deterministic Policy Gradient (Lillicrap et al. 2016).

Departures: the exploration noise is independent at each step and normal, as in the reference, not an
Ornstein-Uhlenbeck process; networks and noise are in [-1, 1], whatever the units of the environment.

Shape legend: B batch, A dimensions of an action, N environments, ... the shape of one observation.
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
    """How DDPG learns; the defaults are the reference's for MuJoCo."""

    learning_rate: float = 3e-4  # of Adam, for the actor and the critic
    adam_eps: float = 1e-8  # Adam's epsilon
    buffer_size: int = 1_000_000  # transitions that are kept
    learning_starts: int = 25_000  # environment steps with random actions before learning
    batch_size: int = 256  # transitions a gradient step
    train_frequency: int = 1  # environment steps, all environments together, between rounds of gradient steps
    gradient_steps: int = 1  # of the critic in a round; -1: as many as environment steps
    gamma: float = 0.99  # discount a step
    tau: float = 0.005  # share of the way that the targets go, once per step of the actor
    policy_frequency: int = 2  # gradient steps of the critic for one of the actor
    exploration_noise: float = 0.1  # deviation of the normal noise in training's actions, which reach from -1 to 1
    hidden_sizes: tuple[int, ...] = (256, 256)  # of the MLPs
    cnn: CnnKind = "nature"  # network on images


class Agent(nn.Module):
    """Actor and critic, and the slow copies of them that make targets."""

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__()
        self.scale = ActionScale(spec.action_space)
        self.exploration_noise = config.exploration_noise
        sizes, dim = config.hidden_sizes, self.scale.dim
        self.actor = Actor(spec, dim, sizes, config.cnn)
        self.critic = Critics(spec, 1, sizes, config.cnn, num_actions=dim)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)

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


def critic_loss(agent: Agent, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared Bellman residual (Lillicrap et al. 2016, eq. 4 and 5)."""
    with torch.no_grad():
        next_value_B = agent.target_critic(batch["next_obs"], agent.target_actor(batch["next_obs"]))[0]
        target_B = batch["reward"] + batch["discount"] * next_value_B
    q_B = agent.critic(batch["obs"], agent.scale.to_unit(batch["action"]))[0]
    loss = (q_B - target_B).square().mean()
    return loss, {"critic_loss": loss.detach(), "q_value": q_B.detach().mean()}


def actor_loss(agent: Agent, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's value of the actor's actions, negative (eq. 6)."""
    loss = -agent.critic(batch["obs"], agent.actor(batch["obs"]))[0].mean()
    return loss, {"actor_loss": loss.detach()}


def train(config: Config, run: Run) -> Agent:
    check_ranges(config)
    agent = run.place(Agent(run.spec, config))
    critic_opt = run.optimizer(agent.critic.parameters(), config.learning_rate, clip=0.0, eps=config.adam_eps)
    actor_opt = run.optimizer(agent.actor.parameters(), config.learning_rate, clip=0.0, eps=config.adam_eps)
    replay = run.replay(config.buffer_size, gamma=config.gamma)
    batch_size = run.per_rank("batch_size", config.batch_size)
    run.state(agent=agent, critic_opt=critic_opt, actor_opt=actor_opt, replay=replay)

    sources = [*agent.actor.parameters(), *agent.critic.parameters()]
    targets = [*agent.target_actor.parameters(), *agent.target_critic.parameters()]
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
                metrics = actor_opt.step(actor_loss, agent, batch)
                polyak(targets, sources, config.tau)
            metrics |= terms
        run.log({f"losses/{name}": x for name, x in metrics.items()})
    return agent
