"""Recurrent PPO: a policy with a memory balances a pole without being told how fast anything moves.

Each rollout is a window of every environment. Episodes end and begin inside it, so `resets` says where the state of a lane starts anew; one
call runs the whole window, forward and backward, however many episodes are in it. The carry at the start of a window is stored with it.

    pip install 'carrywave[examples]'             # gymnasium
    python examples/recurrent_ppo.py              # CartPole from positions alone: 500 steps in each of 20 episodes, after some minutes
    python examples/recurrent_ppo.py compare      # frames a second, in turns with sb3-contrib's RecurrentPPO (pip install sb3-contrib)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import carrywave as cw

TASK = "CartPole-v1"
SEEN = [0, 2]  # of an observation: where the cart is and how far the pole leans; the other two are their speeds
SCALE = np.array([2.4, 0.21], np.float32)  # where an episode ends, so that what is seen lies between -1 and 1
ACTIONS = 2


class Settings(NamedTuple):
    """Of the task and of the algorithm, under their usual names."""

    environments: int = 16
    steps: int = 128  # of each environment in a rollout
    epochs: int = 10
    parts: int = 4  # updates of an epoch, each from all steps of some of the environments
    hidden: int = 64
    learning_rate: float = 1e-3  # at the start; it falls to 0
    clip: float = 0.2  # the same
    gamma: float = 0.995
    gae_lambda: float = 0.95
    value_weight: float = 0.5
    largest_norm: float = 0.5


class Policy(nn.Module):
    """An LSTM, and what it says about the actions and about the future."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = cw.LSTM(len(SEEN), hidden)
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(hidden, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
            for outputs in (ACTIONS, 1)
        )

    def forward(self, seen: Tensor, carry: cw.Carry, resets: Tensor) -> tuple[Tensor, Tensor, cw.Carry]:
        """Log-probabilities of the actions [time, lane, action], values [time, lane], and the carry after the last step."""
        y, carry = self.lstm(seen, carry, resets=resets)
        return self.actor(y).log_softmax(-1), self.critic(y)[..., 0], carry

    def start(self, lanes: int) -> cw.Carry:
        """The carry before the first step."""
        [carry] = self.lstm.initial(lanes)
        return carry


class Rollout(NamedTuple):
    """A window of every environment, [time, lane] each."""

    seen: Tensor
    resets: Tensor  # the first step of an episode
    real: Tensor  # False where nothing was decided: an environment that has ended spends a step on starting again
    action: Tensor
    chance: Tensor  # log-probability of the action, when it was taken
    advantage: Tensor
    value: Tensor  # what the critic should have said

    def lanes(self, some: Tensor) -> Rollout:
        """The window of some of the environments."""
        return Rollout(*(each[:, some] for each in self))


class Actors:
    """Environments that the policy acts in, one step at a time."""

    def __init__(self, policy: Policy, settings: Settings, seed: int) -> None:
        self.policy, self.settings = policy, settings
        self.environments = gymnasium.make_vec(TASK, num_envs=settings.environments)
        self.seen = look(self.environments.reset(seed=seed)[0])
        self.carry = policy.start(settings.environments)
        self.resets = torch.ones(settings.environments, dtype=torch.bool)  # of the step to come
        self.ended = torch.zeros(settings.environments, dtype=torch.bool)  # what is seen now is the last of an episode
        self.lengths: list[int] = []  # of the episodes that have ended
        self._length = np.zeros(settings.environments, np.int64)

    @torch.no_grad()
    def rollout(self) -> tuple[Rollout, cw.Carry]:
        """The next window, and the carry before it."""
        first, rows = self.carry, []
        for _ in range(self.settings.steps):
            chances, value, self.carry = self.policy(self.seen[None], self.carry, self.resets[None])
            action = torch.multinomial(chances[0].exp(), 1)[:, 0]
            before = (self.seen, self.resets, ~self.ended, action, chances[0].gather(-1, action[:, None])[:, 0], value[0])
            observed, reward, terminated, truncated, _ = self.environments.step(action.numpy())
            # After the last step of an episode its final state is seen, and after that the first one of the next.
            self.seen, self.resets, self.ended = look(observed), self.ended, torch.from_numpy(terminated | truncated)
            rows.append((*before, torch.from_numpy(reward).float(), torch.from_numpy(terminated), self.ended))
            self._count(before[2].numpy())
        seen, resets, real, action, chance, value, reward, terminated, ended = (torch.stack(each) for each in zip(*rows, strict=True))
        after = self.policy(self.seen[None], self.carry, self.resets[None])[1]
        advantage = self._advantages(reward, torch.cat((value, after)), terminated, ended)
        return Rollout(seen, resets, real, action, chance, advantage, advantage + value), first

    def _advantages(self, reward: Tensor, value: Tensor, terminated: Tensor, ended: Tensor) -> Tensor:
        """Generalised advantage estimation. An episode that only ran out of time still has the value of what was seen last."""
        gamma, found, later = self.settings.gamma, [], torch.zeros_like(value[0])
        # Rewards are scaled so that a value is a mean of rewards, not a sum: values of 50 would drown the policy's gradient.
        surprise = (1 - gamma) * reward + gamma * value[1:] * ~terminated - value[:-1]
        for step in reversed(range(len(reward))):
            later = surprise[step] + gamma * self.settings.gae_lambda * ~ended[step] * later
            found.append(later)
        return torch.stack(found[::-1])

    def _count(self, real: NDArray[np.bool_]) -> None:
        self._length += real
        over = self.ended.numpy() & real
        self.lengths += self._length[over].tolist()
        self._length[over] = 0


class Learner:
    """The policy's optimizer, and the loss of PPO."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)

    def learn(self, rollout: Rollout, first: cw.Carry, left: float) -> None:
        """All epochs over one rollout; `left` is the share of the training that is still to come."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * left
        known = rollout.advantage[rollout.real]
        rollout = rollout._replace(advantage=(rollout.advantage - known.mean()) / (known.std() + 1e-8))
        for _ in range(settings.epochs):
            for some in torch.randperm(settings.environments).chunk(settings.parts):
                carry = cw.Carry(*(part[:, some] for part in first))
                loss = self.loss(rollout.lanes(some), carry, settings.clip * left)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), settings.largest_norm)
                self.optimizer.step()

    def loss(self, rollout: Rollout, carry: cw.Carry, clip: float) -> Tensor:
        """The mean over the steps at which something was decided."""
        chances, value, _ = self.policy(rollout.seen, carry, rollout.resets)
        ratio = (chances.gather(-1, rollout.action[..., None])[..., 0] - rollout.chance).exp()
        gain = torch.minimum(ratio * rollout.advantage, ratio.clamp(1 - clip, 1 + clip) * rollout.advantage)
        return (self.settings.value_weight * (value - rollout.value).square() - gain)[rollout.real].mean()


def look(observed: NDArray[Any]) -> Tensor:
    """What the policy is shown of an observation."""
    return torch.from_numpy(observed[..., SEEN].astype(np.float32) / SCALE)


def train(frames: int, settings: Settings, seed: int = 1) -> Policy:
    """Train a policy, and print how it is going."""
    torch.manual_seed(seed)
    policy = Policy(settings.hidden)
    actors, learner = Actors(policy, settings, seed), Learner(policy, settings)
    rollouts, begin = max(1, frames // (settings.environments * settings.steps)), time.perf_counter()
    for number in range(rollouts):
        learner.learn(*actors.rollout(), left=1 - number / rollouts)
        if number % 10 == 9:
            done = (number + 1) * settings.environments * settings.steps
            seconds, length = time.perf_counter() - begin, np.mean(actors.lengths[-20:] or [0])
            print(f"{done:,} frames, {done / seconds:,.0f} a second: episodes of {length:.0f} steps", flush=True)
    return policy


@torch.no_grad()
def judge(policy: Policy, episodes: int = 20, seed: int = 1_000) -> NDArray[np.float64]:
    """The return of each of some episodes, with the likeliest action at every step."""
    environments = gymnasium.make_vec(TASK, num_envs=episodes)
    observed, _ = environments.reset(seed=seed)
    carry, never = policy.start(episodes), torch.zeros(1, episodes, dtype=torch.bool)
    returns, running = np.zeros(episodes), np.ones(episodes, np.bool_)
    while running.any():
        chances, _, carry = policy(look(observed)[None], carry, never)
        observed, reward, terminated, truncated, _ = environments.step(chances[0].argmax(-1).numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    return returns


def compare(settings: Settings, rounds: int = 5) -> dict[str, float]:
    """Frames a second here and in sb3-contrib, a rollout and its epochs each in turn.

    Its policy has a second LSTM for the critic, unless it is told that both share one, as they do here.
    """
    from gymnasium.wrappers import TransformObservation
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    def environment() -> gymnasium.Env[Any, Any]:
        space = gymnasium.spaces.Box(-2.0, 2.0, (len(SEEN),), np.float32)
        return TransformObservation(gymnasium.make(TASK), lambda observed: observed[SEEN] / SCALE, space)

    frames = settings.environments * settings.steps

    def theirs(**lstm: bool) -> RecurrentPPO:
        return RecurrentPPO(
            "MlpLstmPolicy",
            DummyVecEnv([environment] * settings.environments),
            n_steps=settings.steps,
            batch_size=frames // settings.parts,
            n_epochs=settings.epochs,
            policy_kwargs={"lstm_hidden_size": settings.hidden, **lstm},
            device="cpu",
        )

    policy = Policy(settings.hidden)
    actors, learner = Actors(policy, settings, seed=1), Learner(policy, settings)
    usual, shared = theirs(), theirs(shared_lstm=True, enable_critic_lstm=False)
    turns: dict[str, Callable[[], object]] = {
        "carrywave": lambda: learner.learn(*actors.rollout(), left=1.0),
        "sb3-contrib": lambda: usual.learn(frames, reset_num_timesteps=False),
        "sb3-contrib with one LSTM": lambda: shared.learn(frames, reset_num_timesteps=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            begin = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - begin)
    return {name: frames / float(np.median(each)) for name, each in seconds.items()}


def main(*words: str, frames: int = 200_000, settings: Settings | None = None) -> float:
    """The mean return of 20 episodes; or, to compare, how many times as fast as sb3-contrib this is."""
    settings = settings or Settings()
    if "compare" in words:
        speed = compare(settings._replace(hidden=256))  # its usual width
        for name, each in speed.items():
            print(f"{name}: {each:,.0f} frames a second; carrywave's are {speed['carrywave'] / each:.1f} times as many")
        return speed["carrywave"] / speed["sb3-contrib"]
    returns = judge(train(frames, settings))
    print(f"return over {len(returns)} episodes: {returns.mean():.0f} +- {returns.std():.0f}")
    return float(returns.mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
