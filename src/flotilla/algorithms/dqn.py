"""DQN (Mnih et al. 2015), and what was added to it: each addition is a value of the configuration.

Double Q-learning (van Hasselt et al. 2016), dueling networks (Wang et al. 2016), prioritised replay (Schaul et al.
2016), n-step returns (Sutton 1988), noisy networks (Fortunato et al. 2018).  Departures: the error is squared unless
`huber`; with noisy networks there is no epsilon, and the noise is drawn anew for each step and each update.

Shape legend: B batch, A actions, N environments, ... the shape of one observation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from flotilla.core.ranges import check_ranges
from flotilla.core.types import Row, Spec, State
from flotilla.functional import epsilon_greedy, polyak, schedule
from flotilla.nets.encoders import CnnKind
from flotilla.nets.values import ActionValues
from flotilla.run import Run
from flotilla.sampling.priorities import Priorities


@dataclass(frozen=True, kw_only=True)
class Config:
    """How DQN learns; the defaults are the reference's for classic control."""

    learning_rate: float = 2.5e-4  # of Adam
    adam_eps: float = 1e-8  # Adam's epsilon
    max_grad_norm: float = 0.0  # largest global norm of the gradient; 0: no clipping
    buffer_size: int = 10_000  # transitions that are kept
    learning_starts: int = 10_000  # environment steps before learning
    batch_size: int = 128  # transitions a gradient step
    train_frequency: int = 10  # environment steps, all environments together, between rounds of gradient steps
    gradient_steps: int = 1  # in a round; -1: as many as environment steps
    gamma: float = 0.99  # discount a step
    n_step: int = 1  # rewards in a return, before the value of what comes next
    tau: float = 1.0  # share of the way that the target goes to the network; 1 copies
    target_network_frequency: int = 500  # environment steps' worth of gradient steps between two moves of the target
    start_e: float = 1.0  # share of random actions at first
    end_e: float = 0.05  # and in the end
    exploration_fraction: float = 0.5  # share of the run in which it falls, on a straight line
    double: bool = False  # the network chooses the next action, the target says what it is worth
    dueling: bool = False  # a stream for the state's value and one for the actions' advantages
    huber: bool = False  # beyond 1 the error counts linearly (Mnih et al. clip its gradient)
    prioritized: bool = False  # draw transitions in proportion to their last error
    per_alpha: float = 0.6  # how far priorities follow errors, from 0 to 1
    per_beta: float = 0.4  # how far weights make up for it at first; 1 at the end of the run
    per_eps: float = 1e-6  # added to errors, so that none is forgotten
    noisy: bool = False  # explore by noise in the weights of the last layers, in place of random actions
    sigma_0: float = 0.5  # the noise's scale at first
    hidden_sizes: tuple[int, ...] = (120, 84)  # of the MLP
    cnn: CnnKind = "nature"  # network on images


class Agent(nn.Module):
    """The network, its target, and the share of random actions."""

    epsilon: Tensor

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__()
        self.network = ActionValues(
            spec,
            config.hidden_sizes,
            config.cnn,
            dueling=config.dueling,
            noisy=config.noisy,
            sigma_0=config.sigma_0,
        )
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.register_buffer("epsilon", torch.tensor(config.start_e))

    def act(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The best action, or any with probability `epsilon`; always the best when the module is in eval mode."""
        self.network.resample()
        action = self.network(row.obs).argmax(-1)
        if self.training:
            action = epsilon_greedy(action, self.network.num_actions, self.epsilon)
        return action, row.reward.new_zeros(len(action), 0), {}


def loss(agent: Agent, batch: dict[str, Any], config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted temporal-difference error, squared (Mnih et al. 2015, algorithm 1), or as Huber counts it."""
    with torch.no_grad():
        next_q_BA = agent.target(batch["next_obs"])
        chooses_BA = agent.network(batch["next_obs"]) if config.double else next_q_BA
        next_value_B = next_q_BA.gather(-1, chooses_BA.argmax(-1, keepdim=True)).squeeze(-1)
        target_B = batch["reward"] + batch["discount"] * next_value_B
    q_B = agent.network(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    error_B = target_B - q_B
    cost_B = huber_loss(q_B, target_B, reduction="none") if config.huber else error_B.square()
    total = (batch["weight"] * cost_B).mean()
    return total, {"td_loss": total.detach(), "q_value": q_B.detach().mean(), "td_error": error_B.detach()}


def train(config: Config, run: Run) -> Agent:
    check_ranges(config)
    agent = run.place(Agent(run.spec, config))
    opt = run.optimizer(
        agent.network.parameters(), config.learning_rate, clip=config.max_grad_norm, eps=config.adam_eps
    )
    replay = run.replay(
        config.buffer_size,
        gamma=config.gamma,
        n_step=config.n_step,
        prioritized=Priorities(alpha=config.per_alpha, eps=config.per_eps) if config.prioritized else None,
    )
    batch_size = run.per_rank("batch_size", config.batch_size)
    run.state(agent=agent, opt=opt, replay=replay)

    sources, targets = [*agent.network.parameters()], [*agent.target.parameters()]
    num_steps = max(1, config.train_frequency // run.config.num_envs)
    ratio = config.gradient_steps / config.train_frequency if config.gradient_steps > 0 else 1.0
    target_period = max(1, round(config.target_network_frequency * ratio))
    for progress in run.ticks():
        # Sample: a few steps of every environment, fewer and fewer of them at random.
        share = progress / max(config.exploration_fraction, 1e-8)
        epsilon = 0.0 if config.noisy else schedule(config.start_e, config.end_e, share)
        agent.epsilon.fill_(epsilon)
        replay.add(run.sampler.rollout(agent.act, num_steps))

        # Learn: as many gradient steps as the new environment steps are worth.
        metrics: dict[str, Tensor] = {}
        for update in run.updates(config.gradient_steps, every=config.train_frequency, after=config.learning_starts):
            batch = replay.sample(batch_size, beta=schedule(config.per_beta, 1.0, progress))
            agent.network.resample()
            agent.target.resample()
            metrics = opt.step(loss, agent, vars(batch), config)
            td_error = metrics.pop("td_error")
            if config.prioritized:
                replay.update_priorities(batch.index, td_error)
            if update % target_period == 0:
                polyak(targets, sources, config.tau)
        run.log({f"losses/{name}": x for name, x in metrics.items()} | {"charts/epsilon": epsilon})
    return agent
