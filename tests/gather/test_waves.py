"""C7: compatible requests form a wave, others are refused with the field named, and results keep to their requests."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
import torch

from hostweights.actors.waves import RequestPath, Wave, Waves
from hostweights.messages.failure import Code, HostWeightsError, Stage, error

PATH = RequestPath(shape=(1, 64), steps=4)
LOST = error(Stage.TRANSPORT, Code.GROUP_BROKEN, "a rank was lost")


class Engine:
    """Answers 10 * request, held back until it is let go."""

    def __init__(self) -> None:
        self.waves: list[Wave[int]] = []
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.answers: Sequence[int | Exception] | BaseException | None = None

    async def __call__(self, wave: Wave[int]) -> Sequence[int | Exception]:
        self.waves.append(wave)
        self.began.set()
        await self.go.wait()
        if isinstance(self.answers, BaseException):
            raise self.answers
        return [10 * request for request in wave.requests[: wave.count]] if self.answers is None else self.answers


@pytest.mark.asyncio
async def test_C7_a_full_wave_starts_at_once_and_results_are_each_request_s_own() -> None:
    engine = Engine()
    engine.go.set()
    waves: Waves[int, int] = Waves(3, engine, wait_s=60.0)
    assert list(await asyncio.gather(*(waves.submit(request, PATH) for request in (1, 2, 3, 4, 5, 6)))) == [
        10,
        20,
        30,
        40,
        50,
        60,
    ]
    assert [wave.requests for wave in engine.waves] == [(1, 2, 3), (4, 5, 6)]
    await waves.close()


@pytest.mark.asyncio
async def test_C7_a_short_wave_keeps_every_rank_in_step_and_gives_the_copy_to_nobody() -> None:
    engine = Engine()
    engine.go.set()
    waves: Waves[int, int] = Waves(4, engine)
    assert list(await asyncio.gather(waves.submit(7, PATH), waves.submit(8, PATH))) == [70, 80]
    assert engine.waves == [Wave(PATH, (7, 8, 7, 8), 2)]
    await waves.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shape", (2, 64)),
        ("steps", 5),
        ("guidance", True),
        ("outputs", 2),
        ("adapter", "style"),
        ("extra", (("sampler", "euler"),)),
    ],
)
async def test_C7_a_request_that_does_not_fit_is_refused_at_submission_with_the_field_named(
    name: str, value: object
) -> None:
    engine = Engine()
    waves: Waves[int, int] = Waves(2, engine, wait_s=60.0)
    first = asyncio.create_task(waves.submit(1, PATH))
    await asyncio.sleep(0)
    with pytest.raises(HostWeightsError, match=f"field '{name}'") as refused:
        await waves.submit(2, msgspec.structs.replace(PATH, **{name: value}))
    assert refused.value.failure.retryable
    assert refused.value.failure.details == {"field": name}
    engine.go.set()
    assert list(await asyncio.gather(first, waves.submit(3, PATH))) == [10, 30]
    await waves.close()


@pytest.mark.asyncio
async def test_C7_another_path_may_follow_while_a_wave_runs() -> None:
    engine = Engine()
    waves: Waves[int, int] = Waves(1, engine)
    first = asyncio.create_task(waves.submit(1, PATH))
    await engine.began.wait()
    second = asyncio.create_task(waves.submit(2, msgspec.structs.replace(PATH, steps=9)))
    await asyncio.sleep(0)
    assert len(engine.waves) == 1
    engine.go.set()
    assert list(await asyncio.gather(first, second)) == [10, 20]
    await waves.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("answers", [[10], [10, 20, 30], ValueError("lost"), asyncio.CancelledError(), LOST])
async def test_B20_too_few_or_too_many_results_and_a_failed_wave_are_every_request_s_error(answers: object) -> None:
    engine = Engine()
    engine.go.set()
    waves: Waves[int, int] = Waves(2, engine)
    engine.answers = answers  # type: ignore[assignment]  # of several kinds
    results = await asyncio.gather(waves.submit(1, PATH), waves.submit(2, PATH), return_exceptions=True)
    for result in results:
        assert isinstance(result, HostWeightsError)
        expected = Code.GROUP_BROKEN if isinstance(answers, HostWeightsError) else Code.HANDLER_FAILED
        assert result.code is expected
    await waves.close()


@pytest.mark.asyncio
async def test_B20_a_warm_up_whose_computation_was_cancelled_fails_and_one_that_is_cancelled_is_cancelled() -> None:
    engine = Engine()
    waves: Waves[int, int] = Waves(2, engine)
    given_up = asyncio.create_task(waves.warm_up(5, PATH))
    await engine.began.wait()
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    engine.answers = asyncio.CancelledError()
    engine.go.set()
    with pytest.raises(HostWeightsError, match="the wave failed: CancelledError"):
        await waves.warm_up(5, PATH)


@pytest.mark.asyncio
async def test_C7_an_error_of_one_request_is_not_another_s() -> None:
    engine = Engine()
    engine.go.set()
    engine.answers = [ValueError("first"), 20]
    waves: Waves[int, int] = Waves(2, engine)
    results = await asyncio.gather(waves.submit(1, PATH), waves.submit(2, PATH), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert results[1] == 20
    await waves.close()


@pytest.mark.asyncio
async def test_C7_a_cancelled_request_gives_its_place_back_while_the_wave_forms() -> None:
    engine = Engine()
    engine.go.set()
    waves: Waves[int, int] = Waves(2, engine, wait_s=60.0)
    gone = asyncio.create_task(waves.submit(1, PATH))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert list(await asyncio.gather(waves.submit(2, PATH), waves.submit(3, PATH))) == [20, 30]
    assert engine.waves == [Wave(PATH, (2, 3), 2)]
    await waves.close()


@pytest.mark.asyncio
async def test_C7_a_cancelled_request_of_tensors_gives_its_place_back_too() -> None:
    """Tensors do not say with a bool whether they are equal, so nothing may compare the requests."""

    async def sums(wave: Wave[torch.Tensor]) -> list[int | Exception]:
        return [int(request.sum()) for request in wave.requests[: wave.count]]

    waves: Waves[torch.Tensor, int] = Waves(3, sums, wait_s=60.0)
    stays, gone = (asyncio.create_task(waves.submit(torch.full((2,), value), PATH)) for value in (1, 2))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    later = [waves.submit(torch.full((2,), value), PATH) for value in (3, 4)]
    assert list(await asyncio.gather(stays, *later)) == [2, 6, 8]
    await waves.close()


@pytest.mark.asyncio
async def test_W18_warm_up_runs_on_every_rank_and_a_closed_front_takes_nothing() -> None:
    engine = Engine()
    engine.go.set()
    waves: Waves[int, int] = Waves(3, engine)
    await waves.warm_up(5, PATH)
    assert engine.waves == [Wave(PATH, (5, 5, 5), 3)]
    await waves.close()
    with pytest.raises(HostWeightsError) as closed:
        await waves.submit(1, PATH)
    assert closed.value.code is Code.ACTOR_STOPPED
