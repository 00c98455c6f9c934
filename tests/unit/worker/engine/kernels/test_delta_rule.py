"""Every implementation of the gated delta rule computes what a plain loop does."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.kernels import delta_kernel
from omlx_worker.engine.kernels.contest import HERE
from omlx_worker.engine.kernels.cpu.delta_rule import ProductRule
from omlx_worker.engine.kernels.delta_rule import DeltaRule, Inputs, Kept
from omlx_worker.engine.kernels.device import for_device
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.delta_rule import PlainRule
from omlx_worker.engine.kernels.source import Platform, source
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import needs_compiler

SLOTS, KEY_HEADS, HEADS, DK, DV = 3, 2, 4, 32, 16

DEVICE_RULE = for_device(HERE).rule

RULES = {"the device's": DEVICE_RULE, "Metal's": Kernels().rule}

on_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA")

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="chunks are for the CPU")


@dataclass
class Case:
    """A window after one whose drafts were accepted in part."""

    window: Inputs
    kept: Kept | None
    accepted: mx.array
    state: mx.array


def inputs(rng: np.random.Generator, width: int, slots: int = SLOTS) -> Inputs:
    def unit(*shape: int) -> mx.array:
        vectors = rng.normal(size=shape)
        return mx.array(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), mx.float32)

    return Inputs(
        unit(slots, width, KEY_HEADS, DK),
        unit(slots, width, KEY_HEADS, DK),
        mx.array(rng.normal(size=(slots, width, HEADS, DV)), mx.float32),
        mx.array(np.exp(-rng.exponential(size=(slots, width, HEADS))), mx.float32),
        mx.array(rng.uniform(size=(slots, width, HEADS)), mx.float32),
    )


def case(width: int, depth: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    kept = inputs(rng, 1 + depth).kept if depth else None
    accepted = [min(depth, slot) for slot in range(SLOTS)]
    state = mx.array(rng.normal(size=(SLOTS, HEADS, DV, DK)), mx.float32)
    return Case(inputs(rng, width), kept, mx.array(accepted, mx.int32), state)


def by_loop(window: Inputs, state: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs of one slot's positions ``[W, H, Dv]``, and the state after each, in float64."""
    queries, keys, values, decay, beta = (np.array(part, np.float64) for part in window)
    outs, states = np.zeros(values.shape), []
    for at in range(len(values)):
        state = state.copy()
        for head in range(HEADS):
            key = keys[at, head // (HEADS // KEY_HEADS)]
            held = state[head] * decay[at, head]
            change = beta[at, head] * (values[at, head] - held @ key)
            state[head] = held + np.outer(change, key)
            outs[at, head] = state[head] @ queries[at, head // (HEADS // KEY_HEADS)]
        states.append(state)
    return outs, states


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """A window's outputs, and the state after its first position, by the plain loop."""
    outs, states = [], []
    for slot in range(SLOTS):
        state = np.array(case.state[slot], np.float64)
        count = int(case.accepted[slot].item())
        if case.kept is not None and count:
            kept = [part[slot, 1 : 1 + count] for part in case.kept]
            state = by_loop(Inputs(kept[0], *kept), state)[1][-1]
        out, after = by_loop(Inputs(*(part[slot] for part in case.window)), state)
        outs.append(out)
        states.append(after[0])
    return np.stack(outs), np.stack(states)


def close(got: mx.array, wanted: np.ndarray, tolerance: float = 2e-5) -> bool:
    return bool(np.allclose(np.array(got.astype(mx.float32)), wanted, tolerance, tolerance))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("width", "depth"), [(1, 0), (1, 3), (4, 0), (2, 1), (4, 3), (3, 1)])
def test_a_step_replays_what_was_accepted_and_commits_its_first_position(
    width: int, depth: int, rule: DeltaRule
) -> None:
    made = case(width, depth)
    wanted_outs, wanted_state = expected(made)

    outs, state = rule.replay_and_run(made.window, made.kept, made.accepted, made.state)

    assert close(outs, wanted_outs)
    assert close(state, wanted_state)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("width", [1, 5, 8, 9, 16, 17, 33, 100])
def test_a_stretch_of_a_prompt_is_committed_whole_however_it_is_cut(
    width: int, rule: DeltaRule
) -> None:
    rng = np.random.default_rng(width)
    prompt = inputs(rng, width, slots=1)
    start = mx.array(rng.normal(size=(1, HEADS, DV, DK)), mx.float32)

    outs, state = rule.read(prompt, mx.log(prompt.decay), start)

    wanted, states = by_loop(Inputs(*(part[0] for part in prompt)), np.array(start[0], np.float64))
    assert close(outs[0], wanted)
    assert close(state[0], states[-1])


@on_cpu
def test_chunks_survive_a_decay_too_small_for_a_float() -> None:
    prompt = inputs(np.random.default_rng(0), 40, slots=1)
    log_decay = mx.full(prompt.decay.shape, -200.0)
    prompt = prompt._replace(decay=mx.exp(log_decay))
    start = mx.ones((1, HEADS, DV, DK))

    outs, state = ProductRule().read(prompt, log_decay, start)

    wanted, states = by_loop(Inputs(*(part[0] for part in prompt)), np.array(start[0], np.float64))
    assert close(outs[0], wanted)
    assert close(state[0], states[-1])


@on_cpu
def test_chunks_survive_a_prompt_that_repeats_one_token() -> None:
    one = inputs(np.random.default_rng(0), 1, slots=1)
    prompt = Inputs(*(mx.repeat(part, 200, axis=1) for part in one))
    prompt = prompt._replace(decay=mx.ones_like(prompt.decay), beta=mx.ones_like(prompt.beta))
    start = mx.zeros((1, HEADS, DV, DK))

    outs, state = ProductRule().read(prompt, mx.zeros_like(prompt.decay), start)

    wanted, states = by_loop(Inputs(*(part[0] for part in prompt)), np.array(start[0], np.float64))
    assert close(outs[0], wanted)
    assert close(state[0], states[-1])


@needs_compiler
@pytest.mark.parametrize(("width", "depth"), [(1, 0), (4, 0), (1, 3), (3, 2)])
def test_lanes_that_share_a_row_of_the_state_do_what_a_loop_does(
    width: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_kernel, "launch", emulator.launch)
    made = case(width, depth)

    outs, state = delta_kernel.DeltaKernel("metal").replay_and_run(
        made.window, made.kept, made.accepted, made.state
    )

    wanted_outs, wanted_state = expected(made)
    assert close(outs, wanted_outs)
    assert close(state, wanted_state)


@on_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("width", "depth"), [(1, 0), (1, 3), (4, 0), (4, 3), (2, 3)])
def test_the_kernel_computes_what_the_operations_do(
    width: int, depth: int, dtype: mx.Dtype
) -> None:
    made = case(width, depth)

    def typed(part: mx.array, decay: bool) -> mx.array:
        return part if decay else part.astype(dtype)

    window = Inputs(*(typed(part, at == 3) for at, part in enumerate(made.window)))
    kept = made.kept and Kept(*(typed(part, at == 2) for at, part in enumerate(made.kept)))

    start = mx.array(np.array(made.state))

    kernel = delta_kernel.DeltaKernel("cuda")
    outs, state = kernel.replay_and_run(window, kept, made.accepted, made.state)
    by_ops, state_by_ops = PlainRule().replay_and_run(window, kept, made.accepted, start)

    assert outs.dtype == dtype
    assert close(outs, np.array(by_ops.astype(mx.float32)), 2e-5 if dtype == mx.float32 else 2e-2)
    assert close(state, np.array(state_by_ops), 2e-5)


@pytest.mark.parametrize("name", ["cuda", "metal"])
@pytest.mark.parametrize("replays", [True, False])
def test_the_source_of_the_kernel_names_what_it_is_given_and_nothing_else(
    name: Platform, replays: bool
) -> None:
    code = re.sub(r"//.*", "", source(name, delta_kernel.code(replays=replays)))
    made = case(1, int(replays))
    inputs = delta_kernel.inputs(made.window, made.kept, made.accepted, made.state)
    given = {*inputs, "outputs", "committed"}
    arrays = set(re.findall(r"\b(\w+)\[", code)) | set(re.findall(r"\b(\w+)_shape\b", code))
    declared = set(re.findall(r"\b(?:float|int|long|auto|four|READONLY T\*) (\w+)", code))

    assert all(re.search(rf"\b{name}\b", code) for name in given)
    assert arrays - declared - {"at"} - {f"{name}_shape" for name in given} <= given
    assert code.count("{") == code.count("}")
    assert not re.search(r"\b(PICK|REPLAYS)\b", code)
    assert ("threadIdx" in code) == (name == "cuda")
    assert ("thread_position_in_grid" in code) == (name == "metal")
