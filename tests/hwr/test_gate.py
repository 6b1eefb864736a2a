"""The forward gate: shared by forwards, alone for a re-bind."""

import copy
import inspect
import io
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.gate import ForwardGate
from hostweights.messages.failure import Code
from loader_models import budget, refused


class Probe(nn.Module):
    """Runs a callback inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inside: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.inside()
        result: torch.Tensor = self.linear(x) * scale
        return result


ONES = torch.ones(2)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def holding(gate: ForwardGate) -> tuple[threading.Thread, threading.Event]:
    """A thread that holds the gate exclusively until the event is set."""
    held, release = threading.Event(), threading.Event()

    def work() -> None:
        with gate.exclusive(budget()):
            held.set()
            assert release.wait(60)

    thread = in_thread(work)
    assert held.wait(60)
    return thread, release


def forward_held(model: Probe) -> tuple[threading.Thread, threading.Event]:
    """A thread inside the model's forward until the event is set."""
    entered, release = threading.Event(), threading.Event()

    def inside() -> None:
        entered.set()
        assert release.wait(60)

    model.inside = inside
    thread = in_thread(lambda: model(ONES))
    assert entered.wait(60)
    model.inside = lambda: None
    return thread, release


def waiting(gate: ForwardGate) -> bool:
    with gate._changed:
        return gate._waiting > 0


def until_waiting(gate: ForwardGate) -> None:
    pause = threading.Event()
    while not waiting(gate):
        pause.wait(0.001)


def test_A13_gated_forward_gives_the_same_results_and_remove_restores_it() -> None:
    model = Probe()
    expected = model(ONES, scale=2.0)
    gate = ForwardGate.install(model)
    assert torch.equal(model(ONES, scale=2.0), expected)
    assert torch.equal(model.forward(ONES, scale=2.0), expected)
    gate.remove()
    gate.remove()
    assert "forward" not in vars(model)
    assert torch.equal(model(ONES, scale=2.0), expected)
    ForwardGate.install(model).remove()


def test_A13_gated_forward_has_the_signature_and_attributes_of_the_models_own() -> None:
    class Marked(Probe):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale=scale)

    vars(Marked.forward).update(inner="mark", gate="mark", own="mark", other="mark")
    model = Marked()
    signature = inspect.signature(model.forward)
    gate = ForwardGate.install(model)
    assert inspect.signature(model.forward) == signature
    assert (model.forward.__name__, vars(model.forward)["other"]) == ("forward", "mark")
    assert model(ONES).shape == (2,)
    assert inspect.signature(copy.deepcopy(model).forward) == signature
    gate.remove()
    assert "forward" not in vars(model)


def test_A13_forwards_run_together() -> None:
    model = Probe()
    ForwardGate.install(model)
    together = threading.Barrier(3)
    model.inside = lambda: together.wait(60)
    threads = [in_thread(lambda: model(ONES)) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert not together.broken


def test_A13_forward_waits_for_a_rebind_and_sees_what_it_did() -> None:
    model = Probe()
    gate = ForwardGate.install(model)
    thread, release = holding(gate)
    started, results = threading.Event(), []

    def work() -> None:
        started.set()
        results.append(model(ONES))

    reader = in_thread(work)
    assert started.wait(60)
    assert results == []
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.fill_(3.0)
    release.set()
    thread.join()
    reader.join()
    assert results[0].tolist() == [3.0, 3.0]


def test_A13_waiting_rebind_is_not_starved_by_new_forwards() -> None:
    model = Probe()
    gate = ForwardGate.install(model)
    first, release = forward_held(model)
    order: list[str] = []

    def rebind() -> None:
        with gate.exclusive(budget()):
            order.append("rebind")

    writer = in_thread(rebind)
    until_waiting(gate)
    model.inside = lambda: order.append("forward")
    late = in_thread(lambda: model(ONES))
    release.set()
    for thread in (first, writer, late):
        thread.join()
    assert order == ["rebind", "forward"]


def test_A13_nested_forward_is_let_through_while_a_rebind_waits() -> None:
    model = Probe()
    gate = ForwardGate.install(model)
    entered, go = threading.Event(), threading.Event()
    depth: list[int] = []

    def inside() -> None:
        depth.append(1)
        if len(depth) == 1:
            entered.set()
            assert go.wait(60)
            model(ONES)

    model.inside = inside
    reader = in_thread(lambda: model(ONES))
    assert entered.wait(60)
    writer = in_thread(lambda: gate.exclusive(budget()).__enter__())
    until_waiting(gate)
    go.set()
    reader.join()
    writer.join()
    assert len(depth) == 2


@pytest.mark.parametrize("code", [Code.CANCELLED, Code.DEADLINE_EXCEEDED])
def test_A13_rebind_that_gives_up_lets_forwards_go_on(code: Code) -> None:
    model = Probe()
    gate = ForwardGate.install(model)
    first, release = forward_held(model)
    limit = PlainBudget(0.05 if code is Code.DEADLINE_EXCEEDED else None)
    caught: list[BaseException] = []

    def rebind() -> None:
        with refused(code), gate.exclusive(limit):
            caught.append(AssertionError("the gate was given away"))

    writer = in_thread(rebind)
    if code is Code.CANCELLED:
        until_waiting(gate)
        limit.cancel()
    writer.join()
    assert caught == []
    assert not waiting(gate)
    assert model(ONES).shape == (2,)
    release.set()
    first.join()


def test_A13_gate_opens_when_forward_or_rebind_raises() -> None:
    model = Probe()
    gate = ForwardGate.install(model)

    def fail() -> None:
        raise ValueError("inside")

    model.inside = fail
    with pytest.raises(ValueError, match="inside"):
        model(ONES)
    with pytest.raises(ValueError, match="inside"), gate.exclusive(budget()):
        fail()
    model.inside = lambda: None
    with gate.exclusive(budget()):
        assert model(ONES).shape == (2,)
    assert model(ONES).shape == (2,)


def test_A13_rebind_inside_a_forward_or_another_is_refused_at_once() -> None:
    model = Probe()
    gate = ForwardGate.install(model)

    def rebind() -> None:
        with refused(Code.UNSUPPORTED, "inside a forward"), gate.exclusive(budget()):
            pass

    model.inside = rebind
    model(ONES)
    with gate.exclusive(budget()):
        rebind()


def test_A13_two_rebinds_exclude_each_other() -> None:
    gate = ForwardGate.install(Probe())
    thread, release = holding(gate)
    with refused(Code.DEADLINE_EXCEEDED), gate.exclusive(PlainBudget(0.05)):
        pass
    release.set()
    thread.join()
    with gate.exclusive(budget()):
        pass


def test_A13_deep_copy_is_independent_and_without_a_gate() -> None:
    model = Probe()
    gate = ForwardGate.install(model)
    twin = copy.deepcopy(nn.ModuleList([model]))[0]
    assert isinstance(twin, Probe)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.fill_(1.0)
    thread, release = holding(gate)
    assert twin(ONES).tolist() == [1.0, 1.0]
    assert copy.deepcopy(twin)(ONES).tolist() == [1.0, 1.0]
    release.set()
    thread.join()
    assert not torch.equal(model(ONES), twin(ONES))
    own = ForwardGate.install(twin)
    with own.exclusive(budget()):
        assert model(ONES).shape == (2,)


def test_A13_a_pickle_of_a_gated_module_comes_without_the_gate() -> None:
    model = nn.Linear(2, 2)
    ForwardGate.install(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(ONES), model(ONES))
    nn.init.zeros_(twin.weight)
    assert torch.equal(twin(ONES), twin.bias)
    ForwardGate.install(twin)


def test_A13_second_gate_and_removal_under_another_wrapper_are_refused() -> None:
    model = Probe()
    gate = ForwardGate.install(model)
    with refused(Code.ALREADY_ATTACHED, "Probe"):
        ForwardGate.install(model)
    gated = vars(model)["forward"]
    vars(model)["forward"] = lambda x: gated(x)
    with refused(Code.UNSUPPORTED, "Probe"):
        gate.remove()
    vars(model)["forward"] = gated
    gate.remove()


def test_A13_a_forward_of_the_module_s_own_is_kept() -> None:
    model = nn.Linear(2, 2)
    vars(model)["forward"] = lambda x: x + 1
    gate = ForwardGate.install(model)
    assert model(ONES).tolist() == [2.0, 2.0]
    gate.remove()
    assert model(ONES).tolist() == [2.0, 2.0]
