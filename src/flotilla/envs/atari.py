"""Atari through ale_py: the reference preprocessing, in two thin layers over the emulator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flotilla.core.errors import UsageError
from flotilla.envs.make import EnvOptions, unknown
from flotilla.envs.wrappers import RecordEpisode, StepResult

NAME = "atari"
EXTRA = "atari"
PACKAGES = ("ale_py", "cv2")
OPTIONS: tuple[str, ...] = ()
TRAINING_ONLY = ("reward_clip", "life_loss")
FRAME_STACK = 4
CHECK_IDS = ("ALE/Pong-v5", "BreakoutNoFrameskip-v4")

FRAME_SKIP = 4  # frames an action is held; the last two are merged, since sprites flicker
STACK = 4
SIDE = 84
MAX_FRAMES = 108_000  # half an hour at 60 Hz

# ale_py's ROMs that one player can play, as it spells them.
_ROMS = """
adventure air_raid alien amidar assault asterix asteroids atlantis atlantis2 backgammon bank_heist basic_math
battle_zone beam_rider berzerk blackjack bowling boxing breakout carnival casino centipede chopper_command
crazy_climber crossbow darkchambers defender demon_attack donkey_kong double_dunk earthworld elevator_action
enduro entombed et fishing_derby flag_capture freeway frogger frostbite galaxian gopher gravitar hangman
haunted_house hero human_cannonball ice_hockey jamesbond journey_escape kaboom kangaroo keystone_kapers
king_kong klax koolaid krull kung_fu_master laser_gates lost_luggage mario_bros miniature_golf
montezuma_revenge mr_do ms_pacman name_this_game othello pacman phoenix pitfall pitfall2 pong pooyan
private_eye qbert riverraid road_runner robotank seaquest sir_lancelot skiing solaris space_invaders space_war
star_gunner superman surround tennis tetris tic_tac_toe_3d time_pilot trondead turmoil tutankham up_n_down
venture video_checkers video_chess video_cube video_pinball wizard_of_wor word_zapper yars_revenge zaxxon
"""
GAMES = tuple(_ROMS.split())

# How an id of each style is written, and the probability that the emulator repeats the last action instead.
STYLES = {"ALE/{}-v5": 0.25, "{}NoFrameskip-v4": 0.0, "{}NoFrameskip-v0": 0.25, "atari_{}": 0.0}


@dataclass(frozen=True)
class AtariGame:
    """What an Atari id asks for, whatever emulates it."""

    rom: str  # as ale_py.roms spells it: "ms_pacman"
    sticky: float  # probability that the emulator repeats the last action
    full_action_space: bool = False
    life_loss: bool = True  # in training, a lost life is terminal
    reward_clip: bool = True  # in training, a reward is its sign
    noop_max: int = 30  # up to so many no-ops start an episode, at least one
    fire_reset: bool = True  # FIRE starts an episode where it is the game's action 1


def ids() -> Sequence[str]:
    return [_spell(style, rom) for style in ("ALE/{}-v5", "{}NoFrameskip-v4") for rom in GAMES]


def matches(env_id: str) -> bool:
    return _style(env_id) is not None or _skips_at_random(env_id)


def parse(env_id: str) -> AtariGame | None:
    """What the id asks for; None where it is no Atari id, UsageError where it names a game that ale_py lacks."""
    if _skips_at_random(env_id):
        name = env_id.rpartition("-")[0]
        raise UsageError(f"environment '{env_id}' skips frames at random: take {name}NoFrameskip-v4 or ALE/{name}-v5")
    style = _style(env_id)
    if style is None:
        return None
    spelled = {_spell(style, rom): rom for rom in GAMES}
    if env_id not in spelled:
        raise unknown(env_id, list(spelled))
    return AtariGame(spelled[env_id], STYLES[style])


def frames_per_step(env_id: str, options: EnvOptions) -> int:
    return FRAME_SKIP


def make(env_id: str, options: EnvOptions) -> gym.Env[Any, Any]:
    import ale_py
    import cv2
    from ale_py.env import AtariEnv

    game = parse(env_id)
    assert game is not None
    render_mode: Any = options.render_mode
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    cv2.setNumThreads(0)  # one image is too small to share, and environments are what runs in parallel
    emulator = AtariEnv(
        game.rom,
        obs_type="grayscale",
        frameskip=1,
        repeat_action_probability=game.sticky,
        full_action_space=game.full_action_space,
        max_num_frames_per_episode=MAX_FRAMES,
        render_mode=render_mode,
    )
    screen = AtariScreen(emulator, game)
    recorded = RecordEpisode(screen)
    return AtariTraining(recorded, screen, game) if options.training else recorded


class AtariScreen(gym.Wrapper[Any, Any, Any, Any]):
    """Whole episodes with raw rewards, seen as the last four (84, 84) grey images, newest last."""

    def __init__(self, emulator: Any, game: AtariGame) -> None:
        import cv2

        super().__init__(emulator)
        self._resize, self._area = cv2.resize, cv2.INTER_AREA
        self.ale = emulator.ale
        self.metadata = {**emulator.metadata, "render_fps": 60 // FRAME_SKIP}  # a video plays in real time
        self._actions = list(emulator._action_set)
        self._noop_max = game.noop_max
        meanings = emulator.get_action_meanings()
        # The reference presses actions 1 and 2: there are games that wait for either.
        self.start_actions = (1, 2) if game.fire_reset and len(meanings) > 2 and meanings[1] == "FIRE" else ()
        self._frames = [np.zeros(self.ale.getScreenDims(), np.uint8) for _ in range(2)]
        self._stack = np.zeros((STACK, SIDE, SIDE), np.uint8)
        self.observation_space = spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        for _ in range(int(self.np_random.integers(1, self._noop_max + 1))):
            self.ale.act(self._actions[0])
            if self.ale.game_over():
                self.ale.reset_game()
        self.ale.getScreenGrayscale(self._frames[0])
        self._frames[1].fill(0)
        self._push()
        for action in self.start_actions:
            _, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                self.ale.reset_game()
        return self.restart_stack(), {"lives": self.ale.lives()}

    def step(self, action: Any) -> StepResult:
        ale, chosen = self.ale, self._actions[action]
        reward = 0
        for frame in range(FRAME_SKIP):
            reward += ale.act(chosen)
            over = ale.game_over()
            if frame >= FRAME_SKIP - 2 or over:
                ale.getScreenGrayscale(self._frames[frame % 2])
            if over:
                break
        self._push()
        terminated = over and ale.game_over(with_truncation=False)
        return self._stack, float(reward), terminated, over and not terminated, {"lives": ale.lives()}

    def restart_stack(self) -> NDArray[np.uint8]:
        """The newest image four times, as at the start of an episode."""
        self._stack = np.repeat(self._stack[-1:], STACK, axis=0)
        return self._stack

    def _push(self) -> None:
        stack = np.empty_like(self._stack)  # a new array each time: users keep what they are given
        stack[:-1] = self._stack[1:]
        both = np.maximum(self._frames[0], self._frames[1])
        self._resize(both, (SIDE, SIDE), dst=stack[-1], interpolation=self._area)
        self._stack = stack


class AtariTraining(gym.Wrapper[Any, Any, Any, Any]):
    """A lost life ends the agent's episode, not the game's; rewards are their sign.

    After a lost life `reset()` goes on with the game: a no-op step, then the start actions.  Should the game
    itself end during these, its statistics stand in the info of `reset`.
    """

    def __init__(self, env: gym.Env[Any, Any], screen: AtariScreen, game: AtariGame) -> None:
        super().__init__(env)
        self._screen = screen
        self._life_loss, self._reward_clip = game.life_loss, game.reward_clip
        self._lives = 0
        self._goes_on = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        ended: dict[str, Any] = {}
        if self._goes_on and seed is None:
            self._goes_on = False
            for action in (0, *self._screen.start_actions):
                _, _, terminated, truncated, info = self.env.step(action)
                if terminated or truncated:
                    ended = {"episode": info["episode"]}
                    break
            else:
                self._lives = info["lives"]
                return self._screen.restart_stack(), info
        self._goes_on = False
        obs, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        return obs, info | ended

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = info["lives"]
        # Some games show zero lives for a while before they are over.
        lost = self._life_loss and 0 < lives < self._lives and not (terminated or truncated)
        self._lives, self._goes_on = lives, lost
        if self._reward_clip:
            reward = float(np.sign(float(reward)))
        return obs, reward, terminated or lost, truncated, info


def _style(env_id: str) -> str | None:
    """The style that an id is written in; None where it is no Atari id."""
    for style in STYLES:
        before, after = style.split("{}")
        if re.fullmatch(f"{before}[^/]+{after}", env_id):
            return style
    if env_id.startswith("ALE/"):
        return "ALE/{}-v5"
    return None


def _skips_at_random(env_id: str) -> bool:
    """Whether it is an old id like Pong-v4, whose frame skip is drawn at each step: refused, not preprocessed."""
    name, _, version = env_id.rpartition("-")
    return version in ("v0", "v4") and name in map(_pascal, GAMES)


def _pascal(rom: str) -> str:
    return rom.title().replace("_", "")


def _spell(style: str, rom: str) -> str:
    return style.format(rom if style.startswith("atari_") else _pascal(rom))
