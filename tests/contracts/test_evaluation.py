"""Evaluation: the asked number of whole episodes in raw rewards, the same every time, and nothing else is touched."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.algorithms import ppo
from flotilla.commands import evaluate_run
from flotilla.core.config import RunConfig
from flotilla.core.types import Row, State
from flotilla.evaluation import MAX_ENVS, evaluate, record_video, spec_of

CPU = torch.device("cpu")


def agent_for(config: RunConfig, **values: Any) -> ppo.Agent:
    torch.manual_seed(0)
    return ppo.Agent(spec_of(config), ppo.Config(**values))


@pytest.mark.parametrize("episodes", [1, 4, MAX_ENVS, 23])
def test_every_environment_plays_its_share(episodes: int) -> None:
    """Short episodes have no advantage: an environment that is done early plays no more than the others."""
    config = RunConfig(env_id="CartPole-v1", backend="sync")
    scored = evaluate(config, agent_for(config), CPU, episodes=episodes, policy="sample")
    played = [sum(x.env_index == i for x in scored) for i in range(min(episodes, MAX_ENVS))]
    assert sum(played) == len(scored) == episodes
    assert max(played) - min(played) <= 1
    assert all(x.episodic_return == x.length_steps > 0 for x in scored)


@pytest.mark.parametrize("policy", ["mode", "sample"])
def test_it_repeats_itself_and_leaves_training_alone(policy: str) -> None:
    config = RunConfig(env_id="CartPole-v1", backend="sync")
    agent = agent_for(config)
    before = {key: x.clone() for key, x in agent.state_dict().items()}
    state = torch.get_rng_state()
    first = evaluate(config, agent, CPU, episodes=5, policy=policy)
    assert torch.equal(torch.get_rng_state(), state), "training draws the same numbers as without it"
    assert agent.training
    torch.manual_seed(99)
    agent.eval()
    assert evaluate(config, agent, CPU, episodes=5, policy=policy) == first
    assert not agent.training
    assert all(torch.equal(x, before[key]) for key, x in agent.state_dict().items())
    another = RunConfig(env_id="CartPole-v1", backend="sync", seed=2)
    assert evaluate(another, agent, CPU, episodes=5, policy=policy) != first


def test_the_mode_is_no_draw() -> None:
    """An agent that prefers action 0 by a little always takes it, and mixes where its policy is sampled."""
    config = RunConfig(env_id="probe/Action-v0", backend="sync")
    agent = agent_for(config)
    actions: list[int] = []
    act = agent.act

    def watched(row: Row, state: State) -> Any:
        out = act(row, state)
        actions.extend(out[0].tolist())
        return out

    agent.act = watched  # type: ignore[method-assign]
    with torch.no_grad():
        agent.actor.weight.zero_()
        agent.actor.bias.copy_(torch.tensor([0.1, -0.1]))
    evaluate(config, agent, CPU, episodes=60, policy="mode")
    assert set(actions) == {0}
    actions.clear()
    evaluate(config, agent, CPU, episodes=60, policy="sample")
    assert 0.3 < sum(actions) / len(actions) < 0.6


def test_it_ends_early_when_stopped() -> None:
    config = RunConfig(env_id="CartPole-v1", backend="sync")
    asked = iter([False, True])
    scored = evaluate(config, agent_for(config), CPU, episodes=500, policy="sample", stopped=lambda: next(asked))
    assert 0 < len(scored) < 500
    assert evaluate(config, agent_for(config), CPU, episodes=5, policy="mode", stopped=lambda: True) == []


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_the_memory_lives_through_an_evaluation(memory: Any) -> None:
    """An agent whose memory is the whole policy: chunks of steps do not cut it, a new episode does."""
    config = RunConfig(env_id="probe/Memory-v0", backend="sync")
    agent = agent_for(config, memory=memory, memory_size=8)
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    act = agent.act

    def watched(row: Row, state: State) -> Any:
        out = act(row, state)
        states.append((torch.zeros_like(out[1]) if state is None else state.clone(), out[1].clone()))
        return out

    agent.act = watched  # type: ignore[method-assign]
    evaluate(config, agent, CPU, episodes=60, policy="sample")
    assert len(states) > 32, "more than one chunk"
    assert all(torch.equal(old[1], new[0]) for old, new in pairwise(states))


def test_lost_lives_and_clipped_rewards_are_for_training_only() -> None:
    pytest.importorskip("ale_py")
    config = RunConfig(env_id="BreakoutNoFrameskip-v4", backend="ale")
    scored = evaluate(config, agent_for(config, cnn="a3c"), CPU, episodes=2, policy="sample")
    assert all(x.length_steps > 100 for x in scored), "five lives, not one"


def test_video(tmp_path: Path) -> None:
    import av

    config = RunConfig(env_id="CartPole-v1", backend="sync")
    path = tmp_path / "videos" / "one.mp4"
    frames = record_video(config, agent_for(config), CPU, path, "mode")
    with av.open(str(path)) as file:
        assert sum(1 for _ in file.decode(video=0)) == frames > 5


def test_a_saved_run_evaluates_as_its_agent_did(train_ppo: Any, tmp_path: Path) -> None:
    """Weights and the observation statistics come back from the checkpoint."""
    values = {"seed": 5, "norm_obs": True, "total_timesteps": 2048, "run_dir": str(tmp_path / "run")}
    agent = train_ppo("CartPole-v1", **values)
    config = RunConfig(env_id="CartPole-v1", backend="sync", seed=5)
    returns = [x.episodic_return for x in evaluate(config, agent, CPU, episodes=7, policy="mode")]
    found = evaluate_run(tmp_path / "run", 7)
    assert found["episodic_return_mean"] == pytest.approx(sum(returns) / 7)
    assert found["episodes"] == 7
    assert agent.norm.norms[0].count > 2000
    torch.nn.init.zeros_(agent.norm.norms[0].mean)
    agent.norm.norms[0].var.fill_(1.0)
    blind = [x.episodic_return for x in evaluate(config, agent, CPU, episodes=7, policy="mode")]
    assert blind != returns, "the statistics matter here"
