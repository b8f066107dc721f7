"""Messages in device memory are timed at both ends, and there and back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from carrywave.measure.device_memory import MESSAGES, Ends, exchange, link_rows, there_and_back
from carrywave.measure.timing import LARGE_BYTES, SMALL_BYTES


class Shared:
    """Memory of two workers that are threads of this process; a signal that is raised twice waits, as on a GPU."""

    def __init__(self, rank: int, buffers: list[Tensor], flags: dict[tuple[int, int], threading.Semaphore]) -> None:
        self.rank, self.workers, self.size, self.buffers, self.flags = rank, 2, buffers[0].numel(), buffers, flags
        self.signalled: list[int] = []

    def of(self, rank: int) -> Tensor:
        return self.buffers[rank]

    def signal(self, rank: int, number: int) -> None:
        self.signalled.append(number)
        self.flags[rank, number].release()

    def wait(self, rank: int, number: int) -> None:
        assert self.flags[self.rank, number].acquire(timeout=20)

    def barrier(self, number: int) -> None:
        self.signal(1 - self.rank, number)
        self.wait(1 - self.rank, number)


def both(work: Callable[[Shared, Tensor], None]) -> tuple[Shared, Shared]:
    buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    flags = {(rank, number): threading.Semaphore(0) for rank in range(2) for number in range(MESSAGES + 1)}
    pair = Shared(0, buffers, flags), Shared(1, buffers, flags)
    threads = [threading.Thread(target=work, args=(each, torch.full((16,), 1.0 + each.rank))) for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert all(not flag.acquire(blocking=False) for flag in flags.values())  # every signal was taken down, so a replay finds none raised
    assert [float(buffer.view(torch.float32)[0]) for buffer in buffers] == [2.0, 1.0]
    return pair


def test_messages_of_a_block_are_all_sent_before_the_first_is_waited_for() -> None:
    stamped: dict[int, list[int]] = {0: [], 1: []}

    def work(memory: Shared, message: Tensor) -> None:
        stamps = tuple(torch.tensor(number) for number in range(4))
        exchange(memory, message, stamps, lambda at: stamped[memory.rank].append(int(at)))  # type: ignore[arg-type]

    pair = both(work)
    assert stamped == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert all(memory.signalled == [*range(MESSAGES), MESSAGES] for memory in pair)


def test_messages_go_there_and_back_one_at_a_time() -> None:
    assert both(there_and_back)[0].signalled == list(range(MESSAGES))


def test_two_sizes_tell_the_rate_the_ends_and_the_way() -> None:
    copied = SMALL_BYTES / 300e9
    small, large = Ends(4e-6 + copied, 3e-6, 5.5e-6 + copied), Ends(4e-6 + LARGE_BYTES / 300e9, 3e-6, 9e-6)
    link, ends = link_rows(small, large, reports=True)
    assert link["link"]["bytes_per_second"] == pytest.approx(300e9)
    assert link["link"]["latency_seconds"] == pytest.approx(1.5e-6)
    assert link["link"]["transport"] == "device memory"
    assert ends["overheads"]["recorded_message_seconds"] == pytest.approx(3.5e-6)
    assert list(link_rows(small, large, reports=False)) == [ends]
