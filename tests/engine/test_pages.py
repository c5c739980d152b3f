"""Pages, slots and the queue: whatever comes and goes, nothing is lost and nothing held twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import SamplingParams
from specjax.engine.pages import PagePool, pages_for
from specjax.engine.request import make_jobs
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sample

PAGE = 4


def test_a_page_is_free_again_when_all_who_share_it_have_given_it_back():
    pool = PagePool(4)
    pages = pool.take(2)
    assert 0 not in pages and pool.free == 1
    shared = pool.share(pages[:1])
    pool.release(pages)
    assert pool.free == 2 and pool.used == 1
    pool.release(shared)
    assert pool.free == 3


def test_wrong_use_of_pages_is_refused():
    pool = PagePool(3)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="released and is not held"):
        pool.release(pages)
    with pytest.raises(ValueError, match="is free and cannot be shared"):
        pool.share(pages)


class Device:
    """Stands in for the device: reads prompts at once, emits a few tokens per chunk."""

    def __init__(self, slots, pages, ahead, rewritten=0):
        self.pool = PagePool(pages)
        self.scheduler = Scheduler(slots, slots, self.pool, PAGE, rewritten)
        self.scheduler.ahead = ahead
        self.ahead, self.rewritten = ahead, rewritten
        self.finished, self.started = [], []

    def add(self, prompt, count, n=1):
        params = SamplingParams(max_tokens=count, n=n)
        found = []
        for job in make_jobs(prompt, params, ()):
            found.append(Sample(job, 3))
            self.scheduler.add(found[-1])
        return found

    def turn(self, rng):
        """One schedule -> run -> postprocess, as the engine does it."""
        scheduler = self.scheduler
        while latest := scheduler.reserve():
            scheduler.preempt(latest)
        for prompt in scheduler.next_to_read(lambda width: 2, lambda p: min(p.to_read, 8)):
            prompt.read += min(prompt.to_read, 8)
        for start in scheduler.starts():
            self.check_start(start)
        self.check()
        for sequence in list(scheduler.running.values()):
            most = min(self.ahead // 2, sequence.job.limit - sequence.length)
            sequence.tokens += [1] * int(rng.integers(0, most + 1))
            assert pages_for(sequence.length, PAGE) <= len(sequence.pages)
            if sequence.length == sequence.job.limit:
                scheduler.finish(sequence)
                self.finished.append(sequence)

    def check_start(self, start):
        sequence, read = start.sequence, start.sequence.length - 1
        self.started.append(sequence)
        if start.copies:
            first = max(read - self.rewritten, 0) // PAGE
            targets = sequence.pages[first : pages_for(read, PAGE)]
            assert [target for _, target in start.copies] == targets
            assert all(source != target for source, target in start.copies)

    def check(self):
        """Whoever writes to a page holds it alone; the pool counts what is held."""
        scheduler, held = self.scheduler, set()
        written = []
        for sequence in scheduler.running.values():
            held.update(sequence.pages)
            written += sequence.pages[max(sequence.length - 1 - self.rewritten, 0) // PAGE :]
        for prompt in scheduler._reading.values():
            held.update(prompt.pages)
        assert len(written) == len(set(written)) and 0 not in held
        assert len(held) == self.pool.used
        assert len({s.slot for s in scheduler.running.values()}) == len(scheduler.running)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_sequence_ends_and_every_page_comes_back(seed):
    rng = np.random.default_rng(seed)
    longest, ahead = 24, int(rng.integers(2, 33))
    slots = int(rng.integers(1, 6))
    rewritten = int(rng.integers(0, 3))
    least = pages_for(longest, PAGE) + 1 + pages_for(rewritten, PAGE)  # as `Engine.add` wants
    device = Device(slots, 1 + least + int(rng.integers(0, 12)), ahead, rewritten)
    added, dropped, count = [], 0, 0
    for _ in range(3000):
        if count < 40 and rng.random() < 0.4:
            prompt = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
            n = int(rng.integers(1, 5))
            added += device.add(prompt, int(rng.integers(1, 13)), n)
            count += n
        if added and rng.random() < 0.05:
            victim = added[int(rng.integers(len(added)))]
            if victim not in device.finished:
                device.scheduler.drop(victim)
                added.remove(victim)
                dropped += 1
        device.turn(rng)
        if count >= 40 and len(device.finished) == len(added):
            break
    assert len(device.finished) == len(added), "stuck"
    assert device.pool.used == 0 and not device.scheduler.has_waiting
    assert len(set(device.started)) >= len(added)


def test_the_samples_of_a_prompt_share_its_full_pages_and_get_copies_of_the_last_one():
    device = Device(4, 40, 4)
    a, b, c = device.add(list(range(1, 12)), 4, n=3)  # 10 positions to read: 2 pages and a half
    device.turn(np.random.default_rng(0))
    device.turn(np.random.default_rng(0))
    assert a.pages[:2] == b.pages[:2] == c.pages[:2]
    assert len({a.pages[2], b.pages[2], c.pages[2]}) == 3
