"""The command line: which command, flags and presets; and one clear line for whatever a user gets wrong.

Everything heavy is imported by the command that needs it, so that `flotilla --help` answers at once.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from flotilla import __version__
from flotilla.core.config import RunConfig
from flotilla.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    UsageError,
    nearest,
)
from flotilla.core.names import ALGORITHMS, load
from flotilla.flags import parse, value_of, without_auto

HELP = f"""usage: flotilla <command> [options]

  train <algorithm>     train an agent; the run is a directory that `eval` reads
  train --run-dir DIR   go on with the run in a directory
  eval RUN              play episodes with the agent of a run
  envs [FILTER]         list the environments that can be trained on
  describe <algorithm>  show the configuration, the spaces and the parameters, without training
  bench sampling        measure how fast an environment can be stepped here
  doctor                look at this machine and say what to change

  <algorithm>           {", ".join(ALGORITHMS)}
  --version             print the version
  --help                after a command, too: `flotilla train ppo --help` lists every flag

first steps:
  flotilla train ppo --env-id CartPole-v1
  flotilla train ppo --env-id BreakoutNoFrameskip-v4 --num-envs 16
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Threads of torch that wait for more than some 30 us sleep, rather than spin on cores that simulators could use;
    # to be woken costs as much as a small product.  Read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return code
    except UsageError as error:
        if is_first_rank():
            print("flotilla:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away, as `head` does; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def is_first_rank() -> bool:
    """Whether this process speaks for a torchrun world, or is alone."""
    return os.environ.get("RANK", "0") == "0"


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "envs": _envs,
        "describe": _describe,
        "bench": _bench,
        "doctor": _doctor,
    }
    if not arguments:
        raise UsageError(f"no command given (choose from {', '.join(commands)}; flotilla --help explains them)")
    name, *rest = arguments
    if name in ("--help", "-h", "help"):
        print(HELP, end="")
        return EXIT_DONE
    if name == "--version":
        print("flotilla", __version__)
        return EXIT_DONE
    if name not in commands:
        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(f"unknown {kind} '{name}' ({nearest(name, [*commands, '--help', '--version'])})")
    return commands[name](rest)


def _train(arguments: list[str]) -> int:
    asked = _configure("train", "Train an agent.", arguments)
    if asked.run_config.nproc > 1 and "RANK" not in os.environ:
        from flotilla import rundir
        from flotilla.launch import launch

        # The ranks, and those that replace them after a fault, meet in one directory.
        run_dir = str(rundir.locate(asked.run_config, asked.algorithm))
        command = [sys.executable, "-m", "flotilla", "train", asked.algorithm, *asked.tokens, "--run-dir", run_dir]
        return launch(asked.run_config.nproc, command, asked.run_config.max_restarts)
    from flotilla.commands import train

    return train(asked.algorithm, asked.run_config, asked.config, asked.presets, ["train", *arguments])


def _describe(arguments: list[str]) -> int:
    asked = _configure("describe", "Show what `train` would build.", arguments)
    from flotilla.commands import describe

    with _only_json_on_stdout(asked.json):
        description = describe(asked.algorithm, asked.run_config, asked.config)
    if asked.json:
        print(json.dumps(description))
        return EXIT_DONE
    parameters = {name: f"{count:,}" for name, count in description["modules"].items()}
    parameters["total"] = f"{description['num_parameters']:,}"
    _print_table(["option", "value"], description["config"].items())
    _print_table(["space", "value"], description["spaces"].items())
    _print_table(["module", "parameters"], parameters.items())
    return EXIT_DONE


def _eval(arguments: list[str]) -> int:
    import tyro

    @dataclass(frozen=True, kw_only=True)
    class EvalFlags:
        """Flags of `eval`."""

        # directory of the run, as `train` printed it
        run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = tyro.MISSING
        episodes: int = 20  # episodes to play
        policy: Literal["auto", "mode", "sample"] = "auto"  # most likely action, or a draw; auto: as in training
        seed: int = 0  # root of the evaluation's random streams; 0: the run's own seed
        checkpoint: str = ""  # directory of a checkpoint; empty: the run's last one
        video: bool = False  # MP4 of one episode in RUN/videos
        json: bool = False  # print one JSON object instead of a table

    flags = parse("flotilla eval", "Play episodes with the agent of a run.", EvalFlags(), arguments)
    if flags.episodes < 1:
        raise UsageError(f"--episodes {flags.episodes} plays nothing (give 1 or more)")
    if flags.checkpoint and not Path(flags.checkpoint).is_dir():
        raise UsageError(f"--checkpoint '{flags.checkpoint}' is no directory (choose one in RUN/checkpoints)")
    from flotilla.commands import evaluate_run

    with _only_json_on_stdout(flags.json):
        result = evaluate_run(
            Path(flags.run),
            flags.episodes,
            policy="" if flags.policy == "auto" else flags.policy,
            seed=flags.seed,
            video=flags.video,
            checkpoint_dir=flags.checkpoint,
        )
    if flags.json:
        print(json.dumps(result))
    else:
        _print_table(["measure", "value"], result.items())
    return EXIT_DONE


def _envs(arguments: list[str]) -> int:
    import tyro

    @dataclass(frozen=True, kw_only=True)
    class EnvsFlags:
        """Flags of `envs`."""

        # show only ids or suites that contain this text
        filter: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FILTER]")] = ""
        json: bool = False  # print one JSON list instead of a table

    flags = parse("flotilla envs", "List the environments.", EnvsFlags(), arguments)
    from flotilla.envs.make import list_envs, unknown

    with _only_json_on_stdout(flags.json):
        entries = list_envs(flags.filter)
    if not entries:
        raise unknown(flags.filter)
    if flags.json:
        print(json.dumps([asdict(entry) for entry in entries]))
    else:
        rows = ((entry.env_id, entry.suite, "yes" if entry.installed else "no") for entry in entries)
        _print_table(["environment", "suite", "installed"], rows)
    return EXIT_DONE


def _bench(arguments: list[str]) -> int:
    import tyro

    what, *tokens = arguments or [""]
    if what != "sampling":
        raise UsageError(f"bench '{what}' is unknown (flotilla bench sampling --env-id ID; --help after it)")

    @dataclass(frozen=True, kw_only=True)
    class BenchFlags:
        """Flags of `bench sampling`."""

        env_id: str = tyro.MISSING  # environment; `flotilla envs` lists what is installed
        obs_type: Literal["vector", "pixels"] = "vector"  # dm_control only: joint states or camera images
        image_size: int = RunConfig.image_size  # pixels a side, where a suite lets one choose
        action_repeat: int = RunConfig.action_repeat  # simulator steps per environment step, where one may choose
        # environments in parallel; auto tries several numbers
        num_envs: Annotated[int, tyro.conf.arg(help_behavior_hint="(default: auto)")] = RunConfig.num_envs
        num_workers: int = 0  # processes of the workers backend; 0 or auto: what fits the cores and the environment
        backends: str = ""  # names with commas between them; empty: all that can step the environment
        seconds: float = 3.0  # for each measurement
        json: bool = False  # print a JSON object a line, as soon as it is measured; the tables go to stderr

    tokens, automatic = without_auto(["--num-envs", "auto", *tokens])
    flags = parse("flotilla bench sampling", "Measure how fast environments are stepped.", BenchFlags(), tokens)
    from flotilla import bench

    values = asdict(flags)
    backends, seconds, as_json = (values.pop(name) for name in ("backends", "seconds", "json"))
    config = bench.checked(RunConfig(**values), automatic)
    skipped: list[str] = []
    stdout = sys.stdout
    with _only_json_on_stdout(as_json):
        with _progress() as say:
            report = bench.Sampling(config, backends.split(",") if backends else [], seconds)
            alone = report.alone(say)
            for trial in report.trials(say, skipped.append):
                if as_json:
                    say("")
                    print(json.dumps(asdict(trial)), file=stdout, flush=True)
        _print_table([config.env_id, "alone"], alone)
        _print_table(*report.table())
        print(*skipped, report.choice(), sep="\n")
    return EXIT_DONE


def _doctor(arguments: list[str]) -> int:
    @dataclass(frozen=True, kw_only=True)
    class DoctorFlags:
        """Flags of `doctor`."""

        json: bool = False  # print one JSON object instead of a table

    flags = parse("flotilla doctor", "Look at this machine and say what to change.", DoctorFlags(), arguments)
    from flotilla.doctor import examine

    with _only_json_on_stdout(flags.json):
        findings = examine()
    healthy = not any(finding.level == "must" for finding in findings)
    if flags.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print_table(["topic", "found", "", "what to change"], ((f.topic, f.found, f.level, f.fix) for f in findings))
    return EXIT_DONE if healthy else EXIT_FAILED


@dataclass(frozen=True)
class _Asked:
    """What the command line of `train` or `describe` asks for."""

    algorithm: str
    run_config: RunConfig
    config: Any
    presets: list[str]
    json: bool
    tokens: list[str]  # the flags as they were typed, with numbers in place of auto


def _configure(command: str, description: str, arguments: list[str]) -> _Asked:
    """Defaults, then presets or what the run to be continued says, then flags.

    The flags are read twice: once to learn the presets and the environment, and once on top of the presets.
    """
    algorithm, *tokens = arguments or [""]
    if algorithm in ("-h", "--help"):
        print(f"usage: flotilla {command} <algorithm> [options]\n\n{description}\n")
        print(f"<algorithm> is one of: {', '.join(ALGORITHMS)}. After it, --help lists its flags.")
        raise SystemExit(EXIT_DONE)
    from flotilla import rundir

    if command == "train" and algorithm.startswith("--") and (given := value_of("--run-dir", arguments)):
        algorithm, tokens = rundir.algorithm_of(Path(given)), arguments
    if not algorithm or algorithm.startswith("-"):
        raise UsageError(f"{command} needs an algorithm first (flotilla {command} {'|'.join(ALGORITHMS)} ...)")
    bare = load("algorithm", ALGORITHMS, algorithm).Config()
    from flotilla.core import presets
    from flotilla.envs.make import suite_of

    tokens, automatic = without_auto(tokens)
    prog = f"flotilla {command} {algorithm}"
    description += " The defaults shown are those without a preset."
    with_json = command == "describe"
    flags = parse(prog, description, _blank(algorithm, RunConfig(), bare, with_json), tokens)
    names, run_dir = list(flags.preset), Path(flags.run.run_dir)
    if command == "train" and rundir.holds_run(run_dir):
        names, automatic = [str(run_dir / rundir.CONFIG_FILE), *names], set()
    elif not names:
        names = [presets.for_suite(suite_of(flags.run.env_id))]
        if names != [presets.NONE]:
            told = f"preset: {names[0]} (for {flags.run.env_id}; --preset none turns this off)"
            if is_first_rank() and not (flags.run.nproc > 1 and "RANK" not in os.environ):  # its ranks will say it
                print(told, file=sys.stderr if with_json and flags.json else sys.stdout)
    run_config, config = presets.apply(names, algorithm, RunConfig(), bare)
    flags = parse(prog, description, _blank(algorithm, run_config, config, with_json), tokens)
    as_json = with_json and flags.json
    resolved = _measured(flags.run, automatic, as_json) if automatic else flags.run
    for name in sorted(automatic):
        tokens += [f"--{name.replace('_', '-')}", str(getattr(resolved, name))]
    return _Asked(algorithm, resolved, getattr(flags, algorithm), names, as_json, tokens)


def _measured(config: RunConfig, automatic: set[str], as_json: bool) -> RunConfig:
    """Numbers for the fields that were left to measurement; says which, and from where."""
    from flotilla import bench

    skipped: list[str] = []
    with _only_json_on_stdout(as_json):
        with _progress() as say:
            tuned = bench.tune(bench.checked(config, automatic), say, skipped.append)
        if tuned.trials:
            _print_table(*bench.table(tuned.trials))
        print(*skipped, tuned.words, sep="\n")
    return tuned.config


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is going on, and is gone afterwards.

    Without a thread that draws, since Gymnasium forks its processes meanwhile.
    """
    terminal = sys.stderr

    def say(text: str) -> None:
        if terminal.isatty():
            print(f"\r\x1b[2K{text}", end="", file=terminal, flush=True)

    try:
        yield say
    finally:
        say("")


def _blank(algorithm: str, run_config: RunConfig, config: Any, with_json: bool) -> Any:
    """The flags of `train` or `describe`, nothing typed yet; its fields' names title the groups of --help."""
    from tyro.conf import UseAppendAction, arg

    preset = arg(
        name="preset",
        metavar="NAME|FILE.yaml",
        help="values for many flags at once; may be repeated, the last one wins, flags win over all. "
        "Without it the environment chooses one; none: bare defaults.",
    )
    as_json = arg(name="json", help="print one JSON object instead of tables")
    groups: list[tuple[str, Any, Any]] = [
        ("preset", Annotated[list[str], UseAppendAction, preset], field(default_factory=list)),
        *([("json", Annotated[bool, as_json], False)] if with_json else []),
        ("run", RunConfig, run_config),
        (algorithm, type(config), config),
    ]
    return make_dataclass("Flags", groups, frozen=True, kw_only=True)()


@contextlib.contextmanager
def _only_json_on_stdout(wanted: bool) -> Iterator[None]:
    """Sends what libraries print on stdout to stderr, where the caller prints one JSON object there."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)
