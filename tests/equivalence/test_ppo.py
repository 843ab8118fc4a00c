"""What must not change the result of PPO does not: the same seed, an evaluation, torch.compile."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.algorithms import ppo
from flotilla.compute.compile import compiled
from flotilla.compute.optimizer import gradients
from flotilla.core.config import RunConfig
from flotilla.core.types import tree_map
from flotilla.envs.make import EnvOptions
from flotilla.sampling.choose import make_backend
from flotilla.sampling.sampler import Sampler

Train = Callable[..., ppo.Agent]
SHORT: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "total_timesteps": 512}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("CartPole-v1", {}),
    ("Pendulum-v1", {"norm_obs": True, "norm_reward": True}),
    ("probe/Memory-v0", {"memory": "lstm"}),
    ("probe/Counter-v0", {"cnn": "impala", "memory": "gru", "total_timesteps": 128}),
    ("CartPole-v1", {"backend": "envpool", "env_groups": 2, "memory": "lstm"}),
]


def weights(agent: ppo.Agent) -> dict[str, Tensor]:
    return {key: x.clone() for key, x in agent.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(x, second[key]) for key, x in first.items())


@pytest.mark.parametrize(("env_id", "values"), VARIANTS)
def test_the_same_seed_gives_the_same_weights_bit_for_bit(
    train_ppo: Train, env_id: str, values: dict[str, Any]
) -> None:
    if values.get("backend") == "envpool":
        pytest.importorskip("envpool")
    once = weights(train_ppo(env_id, **SHORT | values))
    torch.manual_seed(12345)  # nothing of what came before matters
    assert same(once, weights(train_ppo(env_id, **SHORT | values)))
    assert not same(once, weights(train_ppo(env_id, **SHORT | values, seed=2)))


def test_a_memory_stays_with_its_environment_when_groups_take_turns() -> None:
    """Whole sequences from the first state give the probabilities that acting step by step gave."""
    pytest.importorskip("envpool")
    torch.manual_seed(0)
    config = ppo.Config(memory="lstm", memory_size=8)
    run_config = RunConfig(env_id="CartPole-v1", backend="envpool")
    backend = make_backend(run_config, EnvOptions(), num_envs=4, num_groups=2)
    sampler = Sampler(backend, torch.device("cpu"))
    agent = ppo.Agent(sampler.spec, config)
    with torch.no_grad():
        agent.actor.weight *= 300  # as large that what is remembered decides
        for _ in range(2):
            batch, _ = ppo.samples(agent, sampler.rollout(agent.act, 16), config)
            policy, _, _ = agent(batch["obs"], batch["state"], batch["is_first"])
            torch.testing.assert_close(policy.log_prob(batch["action"]), batch["log_prob"], atol=1e-4, rtol=1e-4)
        swapped, _, _ = agent(batch["obs"], batch["state"].roll(2, 0), batch["is_first"])
    sampler.close()
    assert (swapped.log_prob(batch["action"]) - batch["log_prob"]).abs().max() > 0.1


@pytest.mark.parametrize("policy", ["mode", "sample"])
def test_evaluations_and_checkpoints_change_nothing(train_ppo: Train, tmp_path: Path, policy: str) -> None:
    plain = weights(train_ppo("CartPole-v1", **SHORT))
    watched = train_ppo(
        "CartPole-v1",
        **SHORT,
        eval_every=128,
        eval_policy=policy,
        checkpoint_every=128,
        log_every_s=0.0,
        capture_video=True,
        run_dir=str(tmp_path / "watched"),
    )
    assert (tmp_path / "watched" / "metrics.jsonl").read_text().count("eval/episodic_return_mean") == 4
    assert same(plain, weights(watched))


def test_every_part_learns(train_ppo: Train) -> None:
    """No module is left out of the optimizer; statistics move, too."""
    values: dict[str, Any] = SHORT | {"cnn": "impala", "memory": "lstm", "norm_obs": True, "total_timesteps": 128}
    before = weights(train_ppo("probe/Counter-v0", **values, learning_rate=0.0))
    after = weights(train_ppo("probe/Counter-v0", **values))
    still = [key for key, x in before.items() if torch.equal(x, after[key]) and not key.startswith("norm.")]
    assert not still
    fresh = ppo.Agent(spec_of_counter(), ppo.Config(cnn="impala", memory="lstm", norm_obs=True)).state_dict()
    assert all((fresh[key] != after[key]).any() for key in fresh if key.startswith("norm."))


def spec_of_counter() -> Any:
    backend = make_backend(RunConfig(env_id="probe/Counter-v0"), EnvOptions(), num_envs=1)
    backend.close()
    return backend.spec


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning"
)  # torch's compiler imports what torch deprecates
@pytest.mark.skipif(sys.platform != "linux", reason="torch.compile is tried on Linux only")
@pytest.mark.parametrize(
    ("env_id", "values"), [("Pendulum-v1", {"norm_obs": True}), ("probe/Memory-v0", {"memory": "lstm"})]
)
def test_compiled_is_eager(env_id: str, values: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Loss, gradients, actions' log-probabilities and values of one batch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    config = ppo.Config(num_minibatches=2, memory_size=8, hidden_sizes=(8,), **values)
    sampler = Sampler(make_backend(RunConfig(env_id=env_id), EnvOptions(), num_envs=4), torch.device("cpu"))
    agent = ppo.Agent(sampler.spec, config)
    roll = sampler.rollout(agent.act, 6)
    sampler.close()
    with torch.no_grad():
        minibatch = next(iter(ppo.shuffled(ppo.samples(agent, roll, config)[0], config, lambda x: x)))
        minibatch["log_prob"] += 0.3 * torch.randn_like(minibatch["log_prob"])  # ratios on both sides of the clip

    def run(gradients: Callable[..., Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        parameters = [p for p in agent.parameters() if p.requires_grad]
        return gradients(ppo.loss, (agent, tree_map(torch.clone, minibatch), config, 0.2), parameters)

    torch._dynamo.reset()
    eager, as_compiled = run(gradients), run(compiled(gradients, "default", torch.device("cpu")))
    torch.testing.assert_close(as_compiled, eager, atol=1e-5, rtol=1e-5)
    assert max(grad.abs().max().item() for grad in eager[0]) > 1e-3
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0, "one graph, gradients and all"

    agent.eval()  # the mode, as draws need not come in the same order
    with torch.no_grad():
        row, state = roll.rows.at(3), roll.last_state
        acted, expected = torch.compile(agent.act, fullgraph=True)(row, state), agent.act(row, state)
    torch.testing.assert_close(acted, expected, atol=1e-5, rtol=1e-5)
