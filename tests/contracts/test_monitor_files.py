"""The files of a run, read back: JSON lines, TensorBoard, status, videos, curves; and what a full disk does to them."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flotilla.core.errors import UsageError
from flotilla.core.types import Episode
from flotilla.monitor.monitor import Monitor
from flotilla.monitor.plots import compare, learning_curve
from flotilla.monitor.resources import Resources
from flotilla.monitor.video import VideoWriter
from flotilla.monitor.writers import Writers, read_lines


def make_monitor(run_dir: Path, **changes: object) -> Monitor:
    settings: dict[str, object] = {
        "title": "ppo on CartPole-v1",
        "total_steps": 100,
        "num_envs": 4,
        "frames_per_step": 4,
        "dashboard": "none",
        "log_every_s": 0.0,
        "device": "cpu",
    }
    return Monitor(run_dir, **(settings | changes))  # type: ignore[arg-type]


def train(monitor: Monitor, iterations: int = 5, done: int = 0) -> None:
    """Iterations of 20 steps in which all four environments end an episode at the same moment."""
    monitor.tick(20 * done)
    for i in range(done + 1, iterations + 1):
        steps = 20 * i
        monitor.episodes([Episode(env, float(10 * i + env), 5, steps) for env in range(4)])
        monitor.add({"losses/value_loss": torch.tensor(float(i)), "charts/learning_rate": 1e-3})
        monitor.times(env=0.0, inference=0.0, learning=0.0, waiting=0.0)
        monitor.tick(steps)


def status(run_dir: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((run_dir / "status.json").read_text())
    return loaded


def points(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_no_episode_is_lost_when_several_end_together(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path)
    train(monitor)
    monitor.close("done")
    expected = [(20 * i, env, 10.0 * i + env, 5) for i in range(1, 6) for env in range(4)]
    lines = read_lines(tmp_path / "episodes.jsonl")
    assert [(x["env_steps"], x["env"], x["return"], x["length"]) for x in lines] == expected
    assert points(tmp_path, "charts/episodic_return") == [(steps, value) for steps, _, value, _ in expected]


def test_a_log_line_has_what_happened_since_the_one_before(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path)
    train(monitor)
    monitor.close("done")
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["env_steps"] for line in lines] == [0, 20, 40, 60, 80, 100]
    assert [line.get("losses/value_loss") for line in lines] == [None, 1, 2, 3, 4, 5]
    assert [line.get("charts/episodic_return") for line in lines] == [None, 11.5, 21.5, 31.5, 41.5, 51.5]
    assert [line["charts/episodes"] for line in lines] == [0, 4, 8, 12, 16, 20]
    assert points(tmp_path, "losses/value_loss") == [(20 * i, float(i)) for i in range(1, 6)]


def test_status_tells_where_the_run_stands(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path)
    assert status(tmp_path)["state"] == "running"
    train(monitor)
    monitor.evaluation(100, [Episode(0, 10.0, 10, 0), Episode(1, 20.0, 30, 0)])
    monitor.close("interrupted", "stopped by Ctrl-C")
    monitor.close("done")  # idempotent: the first word stands
    end = status(tmp_path)
    assert end["state"] == "interrupted"
    assert end["message"] == "stopped by Ctrl-C"
    assert (end["env_steps"], end["total_timesteps"], end["episodes"]) == (100, 100, 20)
    assert end["episodic_return_mean"] == pytest.approx(31.5)
    assert end["eval"] == {
        "env_steps": 100,
        "episodic_return_mean": 15.0,
        "episodic_return_std": 5.0,
        "episodic_length_mean": 20.0,
        "episodes": 2.0,
    }
    assert [x.name for x in tmp_path.iterdir() if x.name.startswith(".")] == []


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    writers.metrics(1, 0.5, {"losses/value_loss": math.nan, "losses/entropy": math.inf})
    writers.status({"eval": {"episodic_return_mean": -math.inf}})
    writers.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line == {"env_steps": 1, "elapsed_s": 0.5, "losses/value_loss": None, "losses/entropy": None}
    assert status(tmp_path) == {"eval": {"episodic_return_mean": None}}


def test_a_second_process_continues_after_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 1, "elapsed_s": 0.1}\n{"env_st')
    writers = Writers(tmp_path)
    writers.metrics(2, 0.2, {})
    writers.close()
    assert [line["env_steps"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file can grow beyond 1,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = make_monitor(tmp_path)
    train(monitor, iterations=50)
    monitor.close("done")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "cannot be written (File too large)" in told[0]
    assert status(tmp_path)["state"] == "done"
    for name in ("metrics.jsonl", "episodes.jsonl"):
        whole = (tmp_path / name).read_text().splitlines()
        assert whole == [json.dumps(record) for record in read_lines(tmp_path / name)]
        assert whole
    assert points(tmp_path, "charts/episodic_return")[:4] == [(20, 10.0), (20, 11.0), (20, 12.0), (20, 13.0)]


def test_resources_are_those_of_this_process() -> None:
    resources = Resources("cpu")
    block = np.ones(30_000_000)  # 240 MB that must show
    sample = resources.sample()
    assert block.nbytes < sample["system/memory_bytes"] < 1e11
    assert resources.sample() is sample  # at most once a second


def frames(count: int, height: int, width: int) -> list[np.ndarray]:
    """Two colours side by side, whose border moves."""
    images = []
    for i in range(count):
        image = np.zeros((height, width, 3), np.uint8)
        image[:, : 10 + i] = (200, 40, 40)
        image[:, 10 + i :] = (30, 60, 180)
        images.append(image)
    return images


def decoded(path: Path) -> tuple[list[np.ndarray], str, str]:
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        return [x.to_ndarray(format="rgb24") for x in container.decode(video=0)], context.name, context.pix_fmt


@pytest.mark.parametrize(("height", "width", "factor"), [(84, 84, 5), (210, 160, 2), (401, 603, 1)])
def test_a_video_plays_back_what_was_added(tmp_path: Path, height: int, width: int, factor: int) -> None:
    images = frames(20, height, width)
    path = tmp_path / "videos" / "episode.mp4"
    with VideoWriter(path, fps=30) as video:
        for image in images:
            video.add(image)
    played, codec, pixels = decoded(path)
    assert (len(played), codec, pixels) == (20, "h264", "yuv420p")
    assert played[0].shape == (height * factor + height % 2, width * factor + width % 2, 3)
    for image, shown in zip(images, played, strict=True):
        centres = shown[factor // 2 : height * factor : factor, factor // 2 : width * factor : factor]
        assert np.abs(centres.astype(int) - image).mean() < 4
    assert [x.name for x in path.parent.iterdir()] == ["episode.mp4"]


def test_a_video_that_fails_leaves_nothing(tmp_path: Path) -> None:
    good, other = np.zeros((84, 84, 3), np.uint8), np.zeros((84, 80, 3), np.uint8)
    for bad, words in ((other, "differs from the first"), (good.astype(np.float32), "a frame is uint8")):
        video = VideoWriter(tmp_path / "a.mp4", 30)
        for _ in range(100):
            video.add(good)
        assert [x.name for x in tmp_path.iterdir()] == [".a.mp4.partial"]
        with pytest.raises(ValueError, match=words), video:
            video.add(bad)
        assert list(tmp_path.iterdir()) == []
    with VideoWriter(tmp_path / "b.mp4", 30):
        pass
    assert list(tmp_path.iterdir()) == []


def coloured(path: Path) -> int:
    """Pixels that are neither white nor grey."""
    image = imread(path)[:, :, :3]
    return int((np.ptp(image, axis=2) > 0.2).sum())


def test_the_learning_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path)
    train(monitor)
    monitor.evaluation(100, [Episode(0, 10.0, 10, 0)])
    monitor.close("done")
    assert coloured(tmp_path / "plots" / "learning_curve.png") > 1000


def test_a_curve_without_episodes_says_so(tmp_path: Path) -> None:
    path = learning_curve(tmp_path)
    assert path.stat().st_size > 0
    assert coloured(path) == 0


def test_seeds_are_compared_on_the_steps_they_share(tmp_path: Path) -> None:
    for seed in range(2):
        writers = Writers(tmp_path / str(seed))
        episodes = [Episode(0, float(i + seed), 5, 10 * i + 5 * seed) for i in range(1, 30)]
        writers.episodes(1.0, episodes)
        writers.close()
    out = compare({"ppo": [tmp_path / "0", tmp_path / "1"]}, tmp_path / "results" / "compare.png", "CartPole")
    assert coloured(out) > 1000
    with pytest.raises(UsageError, match="no training episode"):
        compare({"ppo": [tmp_path / "nowhere"]}, out)


def test_the_dashboard_prints_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not sys.stdout.isatty()
    monitor = make_monitor(tmp_path, dashboard="auto")
    train(monitor)
    monitor.note("saved [a checkpoint]")
    monitor.close("done")
    out = capsys.readouterr().out
    assert "saved [a checkpoint]\n" in out
    assert "100 of 100 env steps (100 %)" in out.splitlines()[-1]
    assert "\x1b" not in out
    assert os.linesep * 2 not in out


def test_a_silent_dashboard_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = make_monitor(tmp_path, dashboard="none")
    train(monitor)
    monitor.note("nobody reads this")
    monitor.close("done")
    assert capsys.readouterr() == ("", "")


def test_a_later_start_goes_on_where_the_state_was_taken(tmp_path: Path) -> None:
    """What was written after it is dropped, in the files and for TensorBoard; the counts go on."""
    through, killed = make_monitor(tmp_path / "through"), make_monitor(tmp_path / "killed")
    train(through)
    through.close("done")

    train(killed, 3)
    killed.restart(2, "")
    killed.evaluation(60, [Episode(0, 7.0, 5, 0)])
    state = json.loads(json.dumps(killed.state()))
    train(killed, 9, done=3)  # and then it is killed, in the middle of a line
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 18')
    killed._writers.close()
    later = make_monitor(tmp_path / "killed", resumed=state)
    assert status(tmp_path / "killed")["env_steps"] == 60
    train(later, done=3)
    later.close("done")

    for name, key in (("episodes.jsonl", "return"), ("metrics.jsonl", "losses/value_loss")):
        one, other = (
            [(line["env_steps"], line[key]) for line in read_lines(tmp_path / run / name) if key in line]
            for run in ("through", "killed")
        )
        assert one == other
    for tag in ("charts/episodic_return", "losses/value_loss"):
        assert points(tmp_path / "through", tag) == points(tmp_path / "killed", tag)
    found, expected = status(tmp_path / "killed"), status(tmp_path / "through")
    for key in ("env_steps", "episodes", "episodic_return_mean"):
        assert found[key] == expected[key]
    assert found["env_restarts"] == 1
    assert found["eval"] == {"env_steps": 60, "episodes": 1} | {
        f"episodic_{key}": x for key, x in {"return_mean": 7.0, "return_std": 0.0, "length_mean": 5.0}.items()
    }
