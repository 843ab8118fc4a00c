"""The command line: every flag and alias arrives, presets and flags have their order, a mistake is one line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from flotilla import __version__, cli
from flotilla.algorithms import ppo
from flotilla.core.config import RunConfig
from flotilla.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UsageError
from flotilla.core.names import ALGORITHMS, load
from flotilla.flags import spelled_out

CONFIGS = {name: load("algorithm", ALGORITHMS, name).Config for name in ALGORITHMS}
FLAGS = [("ppo", RunConfig, field) for field in fields(RunConfig)] + [
    (name, owner, field) for name, owner in CONFIGS.items() for field in fields(owner)
]
FLOTILLA = (sys.executable, "-m", "flotilla")


def asked(*arguments: str, preset: str = "none", algorithm: str = "ppo") -> Any:
    return cli._configure("train", "", [algorithm, "--preset", preset, *arguments])


def other_value(owner: type, field: Field[Any]) -> tuple[list[str], Any]:
    """What to type so that the field gets a value that is not its default, and that value."""
    hint = get_type_hints(owner)[field.name]
    flag = "--" + field.name.replace("_", "-")
    if hint is bool:
        return [f"--no-{flag[2:]}" if field.default else flag], not field.default
    if get_origin(hint) is Literal:
        value = next(choice for choice in get_args(hint) if choice != field.default)
        return [flag, value], value
    if get_origin(hint) is tuple:
        return [flag, "32", "1e2"], (32, 100)
    return {
        int: ([flag, "3e3"], 3000),
        float: ([flag, "0.125"], 0.125),
        str: ([f"{flag}=with a space"], "with a space"),
    }[hint]


@pytest.mark.parametrize(
    ("algorithm", "owner", "field"), FLAGS, ids=lambda x: getattr(x, "name", x if isinstance(x, str) else "")
)
def test_every_flag_changes_its_field_and_no_other(algorithm: str, owner: type, field: Field[Any]) -> None:
    assert field.default is not MISSING
    typed, value = other_value(owner, field)
    found = asked(*typed, algorithm=algorithm)
    for config in (found.run_config, found.config):
        for other in fields(config):
            expected = value if (type(config), other.name) == (owner, field.name) else other.default
            assert getattr(config, other.name) == expected


@pytest.mark.parametrize(
    "typed",
    [["--num-envs", "3"], ["--num_envs", "3"], ["--num-envs=3"], ["--num_envs=3"], ["--envs", "3"], ["--envs=3"]],
)
def test_spellings_of_a_flag(typed: list[str]) -> None:
    assert asked(*typed).run_config.num_envs == 3


def test_aliases() -> None:
    found = cli._configure(
        "train", "", ["ppo", "--task", "Acrobot-v1", "--logdir=a b/c", "--configs", "atari", "--configs=none"]
    )
    assert (found.run_config.env_id, found.run_config.run_dir) == ("Acrobot-v1", "a b/c")
    assert found.presets == ["atari", "none"]
    assert found.config.clip_coef == 0.1


def test_parallel_asks_for_the_backend_of_that_name() -> None:
    spelled = spelled_out("flotilla", {"--backend"}, ["--parallel"])
    assert list(spelled) == ["--backend", "workers"]


def test_numbers() -> None:
    found = asked("--total-timesteps", "500_000", "--seed", "-1", "--gamma", "nan", "--learning-rate", "3e-4")
    assert (found.run_config.total_timesteps, found.run_config.seed) == (500_000, -1)
    assert found.config.gamma != found.config.gamma
    assert found.config.learning_rate == 3e-4


def test_flags_win_over_presets_and_a_later_preset_over_an_earlier(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("num_envs: 2\nseed: 7\nenv_id: Acrobot-v1")
    found = asked("--preset", str(file), "--seed", "9", preset="atari")
    assert (found.run_config.num_envs, found.run_config.seed, found.run_config.env_id) == (2, 9, "Acrobot-v1")
    assert found.config.clip_coef == 0.1
    assert asked("--clip-coef", "0.2", preset="atari").config.clip_coef == 0.2  # the bare default, but typed


@pytest.mark.parametrize(
    ("env_id", "preset", "num_steps"),
    [("CartPole-v1", "classic", 128), ("PongNoFrameskip-v4", "atari", 128), ("HalfCheetah-v5", "mujoco", 2048)],
)
def test_the_environment_chooses_a_preset(
    env_id: str, preset: str, num_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cli._configure("train", "", ["ppo", "--env-id", env_id])
    said = capsys.readouterr()
    assert said.out == f"preset: {preset} (for {env_id}; --preset none turns this off)\n"
    assert said.err == ""
    assert (found.presets, found.config.num_steps) == ([preset], num_steps)


def test_no_preset_where_none_fits_or_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._configure("train", "", ["ppo", "--env-id", "Taxi-v3"]).presets == ["none"]
    assert asked("--env-id", "HalfCheetah-v5").config == ppo.Config()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "no command given (choose from train, eval"),
        ("trian ppo", "unknown command 'trian' (did you mean train?)"),
        ("--verson", "unknown flag '--verson' (did you mean --version?)"),
        ("train", "train needs an algorithm first"),
        ("train --env-id CartPole-v1 ppo", "train needs an algorithm first"),
        ("train ppoo", "unknown algorithm 'ppoo': did you mean ppo?"),
        ("train ppo --num-env 3", "unknown flag '--num-env' (did you mean --num-envs"),
        ("train ppo --num_env=3", "unknown flag '--num_env' (did you mean --num-envs"),
        ("train ppo --num-envs", "Missing value for argument '--num-envs'"),
        ("train ppo --num-envs three", "Error parsing --num-envs: 'three' is not a whole number"),
        ("train ppo --num-envs 1.5", "Error parsing --num-envs: '1.5' is not a whole number"),
        ("train ppo --learning-rate fast", "Error parsing --learning-rate: could not convert string to float: 'fast'"),
        ("train ppo --hidden-sizes 64 big", "Error parsing --hidden-sizes"),
        ("train ppo --backend threads", "invalid choice 'threads' for argument '--backend'. Expected one of ('auto',"),
        ("train ppo --anneal-lr=False", "--anneal-lr takes no value (write --anneal-lr or --no-anneal-lr)"),
        ("train ppo --anneal-lr maybe", "Unrecognized options: maybe"),
        ("train ppo -x", "Unrecognized options: -x"),
        ("train ppo --preset atary", "unknown preset 'atary' (did you mean atari?)"),
        ("train ppo --preset mine.yaml", "preset file 'mine.yaml' does not exist"),
        ("train ppo --env-id CartPoll-v1", "CartPoll-v1"),
        ("train ppo --num-envs 0", "num_envs"),
        ("train ppo --total-timesteps -5", "total_timesteps"),
        ("eval", "Missing from flotilla eval: RUN"),
        ("eval nowhere", "nowhere"),
        ("eval nowhere --episodes 0", "--episodes 0 plays nothing"),
        ("eval nowhere --checkpoint missing", "--checkpoint 'missing' is no directory"),
        ("eval nowhere --policy best", "invalid choice 'best' for argument '--policy'"),
        ("envs CartPool", "unknown environment 'CartPool': did you mean CartPole"),
        ("envs --jsn", "unknown flag '--jsn' (did you mean --json"),
        ("describe ppo --env-id Nonsense-v0", "Nonsense-v0"),
        ("doctor now", "Unrecognized options: now"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(typed.split()) == EXIT_USAGE
    output = capsys.readouterr()
    assert output.err.startswith("flotilla: ")
    assert output.err.count("\n") == 1
    assert said in output.err
    assert all(line.startswith("preset: ") for line in output.out.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_a_narrow_colour_terminal_is_still_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("tyro._fmtlib._FORCE_ANSI", True)
    with pytest.raises(UsageError) as caught:
        asked("--backend", "threads")
    choices = "('auto', 'sync', 'workers', 'envpool', 'ale')"
    expected = f"invalid choice 'threads' for argument '--backend'. Expected one of {choices}."
    assert str(caught.value) == f"{expected} (see flotilla train ppo --help)"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("command", ["train", "describe"])
def test_help_of_an_algorithm_lists_every_flag_with_words(
    command: str, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, algorithm, "--help"])
    assert stop.value.code == EXIT_DONE
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "run options" in shown
    assert f"{algorithm} options" in shown
    for field in (*fields(RunConfig), *fields(CONFIGS[algorithm])):
        flag = re.escape(field.name.replace("_", "-"))
        typed = rf"--{flag}(, --no-{flag}| [A-Z]+| \{{\S+\}}| \[(INT|FLOAT) \[(INT|FLOAT) \.\.\.\]\])"
        assert re.search(rf"{typed} \w+\W.*?\(default: ", shown), f"--{flag} has no words"
    assert ("--json" in shown) == (command == "describe")


@pytest.mark.parametrize("arguments", [["train", "--help"], ["describe", "-h"]])
def test_help_without_an_algorithm_names_them(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == EXIT_DONE
    assert "ppo" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help"])
def test_help_comes_before_anything_heavy(arguments: str) -> None:
    code = f"""
import sys
from flotilla import cli
try:
    code = cli.main({arguments.split()})
except SystemExit as stop:
    code = stop.code
heavy = {{"torch", "tyro", "gymnasium", "numpy", "rich", "yaml"}}
print(code, heavy & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([*FLOTILLA, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_DONE, f"flotilla {__version__}\n", "")
    done = subprocess.run([*FLOTILLA, "bogus"], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_USAGE
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_drama() -> None:
    with subprocess.Popen([*FLOTILLA, "envs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == EXIT_FAILED


def test_ctrl_c_outside_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: list[str]) -> int:
        signal.raise_signal(signal.SIGINT)
        return EXIT_DONE

    monkeypatch.setattr(cli, "_doctor", interrupted)
    assert cli.main(["doctor"]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == ""


def test_envs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envs", "cartpole-v1", "--json"]) == EXIT_DONE
    assert {"env_id": "CartPole-v1", "suite": "classic", "installed": True} in json.loads(capsys.readouterr().out)
    assert cli.main(["envs", "cartpole-v1"]) == EXIT_DONE
    assert ["CartPole-v1", "classic", "yes"] in [row.split() for row in capsys.readouterr().out.splitlines()]


def test_describe(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["describe", "ppo", "--env-id", "CartPole-v1", "--num-envs", "16"]
    assert cli.main([*flags, "--json"]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"config", "spaces", "num_parameters", "modules"}
    assert (found["config"]["num_envs"], found["config"]["env_id"]) == (16, "CartPole-v1")
    # Two MLPs 4-64-64 with a head for two actions and one for the value.
    assert found["num_parameters"] == sum(found["modules"].values()) == 2 * (5 * 64 + 65 * 64) + 65 * 2 + 65
    assert cli.main(flags) == EXIT_DONE
    assert f"{found['num_parameters']:,}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_train_then_eval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "my run"
    flags = "train ppo --env-id CartPole-v1 --total-timesteps 1024 --eval-episodes 1"
    assert cli.main([*flags.split(), "--dashboard", "none", "--run-dir", str(run)]) == EXIT_DONE
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--episodes", "2", "--policy", "sample", "--seed", "3", "--json"]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"episodic_return_mean", "episodic_return_std", "episodic_length_mean", "episodes"}
    assert (found["episodes"], found["policy"]) == (2, "sample")
    assert found["episodic_return_mean"] == found["episodic_length_mean"]  # CartPole's reward is 1 a step
    assert cli.main(["eval", str(run), "--episodes", "1"]) == EXIT_DONE
    assert "episodic_return_mean" in capsys.readouterr().out


def test_a_saved_run_is_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "train ppo --env-id Acrobot-v1 --preset none --total-timesteps 1024 --eval-episodes 1 --gamma 0.9"
    run = tmp_path / "run"
    assert cli.main([*flags.split(), "--dashboard", "none", "--run-dir", str(run)]) == EXIT_DONE
    capsys.readouterr()
    found = asked(preset=str(run / "config.yaml"))
    assert (found.run_config.env_id, found.config.gamma) == ("Acrobot-v1", 0.9)
    assert found.run_config.run_dir == "auto"
