"""C51, categorical DQN (Bellemare et al. 2017): the network says how the return is distributed, over fixed atoms.

With `double`, `dueling`, `n_step`, `prioritized` and `noisy` it is Rainbow (Hessel et al. 2018), the preset `rainbow`.
Departures: with noisy networks there is no epsilon, and the noise is drawn anew for each step and each update;
probabilities are not clamped, as their logarithms come from the network as they are.

Shape legend: B batch, A actions, K atoms, N environments, ... the shape of one observation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.core.errors import UsageError
from flotilla.core.ranges import check_ranges
from flotilla.core.types import Row, Spec, State
from flotilla.functional import categorical_projection, epsilon_greedy, polyak, schedule
from flotilla.nets.encoders import CnnKind
from flotilla.nets.values import ActionValues
from flotilla.run import Run
from flotilla.sampling.priorities import Priorities


@dataclass(frozen=True, kw_only=True)
class Config:
    """How C51 learns; the defaults are the reference's for classic control."""

    learning_rate: float = 2.5e-4  # of Adam
    adam_eps: float = 0.01 / 128  # Adam's epsilon: 0.01 over the batch size
    max_grad_norm: float = 0.0  # largest global norm of the gradient; 0: no clipping
    buffer_size: int = 10_000  # transitions that are kept
    learning_starts: int = 10_000  # environment steps before learning
    batch_size: int = 128  # transitions a gradient step
    train_frequency: int = 10  # environment steps, all environments together, between rounds of gradient steps
    gradient_steps: int = 1  # in a round; -1: as many as environment steps
    gamma: float = 0.99  # discount a step
    num_atoms: int = 101  # values that a return may have
    v_min: float = -100.0  # the smallest of them
    v_max: float = 100.0  # and the largest
    n_step: int = 1  # rewards in a return, before the value of what comes next
    tau: float = 1.0  # share of the way that the target goes to the network; 1 copies
    target_network_frequency: int = 500  # environment steps' worth of gradient steps between two moves of the target
    start_e: float = 1.0  # share of random actions at first
    end_e: float = 0.05  # and in the end
    exploration_fraction: float = 0.5  # share of the run in which it falls, on a straight line
    double: bool = False  # the network chooses the next action, the target says what it is worth
    dueling: bool = False  # a stream for the state's value and one for the actions' advantages
    prioritized: bool = False  # draw transitions in proportion to their last loss
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
    atom_K: Tensor

    def __init__(self, spec: Spec, config: Config) -> None:
        super().__init__()
        self.network = ActionValues(
            spec,
            config.hidden_sizes,
            config.cnn,
            num_atoms=config.num_atoms,
            dueling=config.dueling,
            noisy=config.noisy,
            sigma_0=config.sigma_0,
        )
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.register_buffer("epsilon", torch.tensor(config.start_e))
        self.register_buffer("atom_K", torch.linspace(config.v_min, config.v_max, config.num_atoms))

    def best(self, logits_BAK: Tensor) -> Tensor:
        """The action (B,) of the largest mean return."""
        return (logits_BAK.softmax(-1) @ self.atom_K).argmax(-1)

    def act(self, row: Row, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The best action, or any with probability `epsilon`; always the best when the module is in eval mode."""
        self.network.resample()
        action = self.best(self.network(row.obs))
        if self.training:
            action = epsilon_greedy(action, self.network.num_actions, self.epsilon)
        return action, row.reward.new_zeros(len(action), 0), {}


def loss(agent: Agent, batch: dict[str, Any], config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted cross-entropy to the target's distribution, projected (Bellemare et al. 2017, algorithm 1).

    Its values for each transition are the priorities of the next draws (Hessel et al. 2018).
    """
    with torch.no_grad():
        next_BAK = agent.target(batch["next_obs"])
        chooses_BAK = agent.network(batch["next_obs"]) if config.double else next_BAK
        next_BK = chosen(next_BAK, agent.best(chooses_BAK)).softmax(-1)
        target_BK = categorical_projection(next_BK, batch["reward"], batch["discount"], config.v_min, config.v_max)
    log_p_BK = chosen(agent.network(batch["obs"]), batch["action"]).log_softmax(-1)
    cost_B = -(target_BK * log_p_BK).sum(-1)
    total = (batch["weight"] * cost_B).mean()
    q_value = (log_p_BK.detach().exp() @ agent.atom_K).mean()
    return total, {"td_loss": total.detach(), "q_value": q_value, "td_error": cost_B.detach()}


def chosen(x_BAK: Tensor, action_B: Tensor) -> Tensor:
    """What belongs to one action of each row (B, K)."""
    return x_BAK.gather(1, action_B[:, None, None].expand(-1, 1, x_BAK.shape[-1])).squeeze(1)


def train(config: Config, run: Run) -> Agent:
    check_ranges(config)
    if config.v_min >= config.v_max:
        raise UsageError(f"v_min={config.v_min} is not below v_max={config.v_max}; give the range of returns")
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
