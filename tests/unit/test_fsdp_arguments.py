"""Arguments that an engine, its steps and its units refuse, and options that make no sense."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.fsdp_steps import cause_of, launch, train

import fsdpcore as fc


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 5), "b": (5,), "scale": (), "none": (0, 4)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def engine_of(backend, units=2, **options):
    made = [fc.Unit(f"u{i}", arrays(i)) for i in range(units)]
    options.setdefault("optimizer", fc.optim.SGD(lr=1.0))
    return fc.FSDP(made, backend, **options)


def unknown_unit(backend, phase):
    with engine_of(backend).step() as step, getattr(step, phase)("u7"):
        pass


def gathered(backend):
    unit = engine_of(backend).units[0]
    unit.unshard()
    return unit.params


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: fc.FSDP([], b), "at least one unit"),
        (lambda b: fc.FSDP({"u": [1, None]}, b), "no arrays in this dict; .* nested containers"),
        (lambda b: fc.FSDP(["u"], b), "must be Unit objects, got str"),
        (lambda b: engine_of(b, strategy="zero9"), "unknown strategy 'zero9'; known: 'full_shard'"),
        (lambda b: engine_of(b, prefetch=-1), "prefetch .in units. must be at least 0, got -1"),
        (
            lambda b: engine_of(b, algorithm="tree"),
            "an engine has no algorithm 'tree'; it has 'auto'",
        ),
        (
            lambda b: engine_of(b, algorithm="native"),
            "an engine has no algorithm 'native'",
        ),  # it is MPI's
        (lambda b: engine_of(b)["nope"], "no unit 'nope'; it has u0, u1"),
        (lambda b: engine_of(b)[fc.Unit("u0", arrays())], "no unit 'u0'"),
        (lambda b: engine_of(b).step(divisor=0), "divisor must be a positive number"),
        (lambda b: fc.FSDP([fc.Unit("a", {}), fc.Unit("a", {})], b), "two units are named 'a'"),
        (lambda b: fc.FSDP(["u"], b), r"got str; make a list .*fc\.Unit\(name, params\)"),
        (
            lambda b: fc.Unit("u", {"l0": arrays(), "l0.w": np.ones(2)}),
            r"two parameters of unit 'u' are named 'l0\.w'; rename one",
        ),
        (lambda b: fc.Unit("", {}), "non-empty string"),
        (
            lambda b: fc.FSDP([fc.Unit("u", {"": np.zeros(3, np.float32)})], b),
            "a parameter's name must be a non-empty string, got ''",
        ),
        (lambda b: fc.Unit("u", {"w": np.zeros(3, np.int32)}), "u.w has dtype int32"),
        (
            lambda b: fc.Unit("u", {"w": np.zeros(3, np.float32), "v": np.zeros(3)}),
            "share one dtype, got w: float32, v: float64",
        ),
        (
            lambda b: engine_of(b).units[0].begin_gradients().__setitem__("w", np.zeros((5, 3))),
            r"gradient of u0.w must have shape \(3, 5\) and dtype float32, got \(5, 3\) and "
            "float64; a gradient has the shape of its parameter, and is summed over the batch$",
        ),
        (
            lambda b: engine_of(b).units[0].begin_gradients().__setitem__("b", np.zeros(5)),
            r"u0\.b must have shape \(5,\) and dtype float32, got \(5,\) and float64; convert",
        ),
        (
            lambda b: engine_of(b).units[0].begin_gradients().__delitem__("b"),
            r"a gradient cannot be removed; leave u0\.b as zeros",
        ),
        (
            lambda b: engine_of(b).units[0].reduce_gradients({"x": np.zeros(3, np.float32)}),
            "unit 'u0' has no gradient of 'x'; it has those of w, b, scale, none",
        ),
        (
            lambda b: engine_of(b).units[0].reduce_gradients({"b": np.zeros(4, np.float32)}),
            r"gradient of u0\.b must have shape \(5,\)",
        ),
        (
            lambda b: engine_of(b).units[0].load({"w": np.zeros((5, 3))}),
            r"u0\.w has shape \(3, 5\) and dtype float32, but the array to load \(5, 3\)",
        ),
        (
            lambda b: engine_of(b).units[0].load({"x": np.zeros(3)}),
            "unit 'u0' has no parameter 'x' to load; it has w, b, scale, none",
        ),
        (lambda b: engine_of(b).step(divisor=-1.0), "divisor must be a positive number"),
        (lambda b: engine_of(b).step(divisor=np.nan), "divisor must be a positive number"),
        (lambda b: engine_of(b).step(divisor=np.inf), "divisor must be a positive number"),
        (lambda b: engine_of(b).step(divisor="8"), "divisor must be a positive number, got '8'"),
        (lambda b: engine_of(b).units[0].reduce_gradients({}, divisor=0), "divisor must be a"),
        (lambda b: train(engine_of(b), clip=0), "clip must be a positive number, got 0"),
        (lambda b: train(engine_of(b), clip=np.nan), "clip must be a positive number, got nan"),
        (lambda b: train(engine_of(b), clip_value=-1), "clip_value must be a positive number"),
        (lambda b: train(engine_of(b), clip=1, clip_value=1), "by norm, or by clip_value, but not"),
        (lambda b: train(engine_of(b), clip=1, norm_type=0), "norm_type must be a positive"),
        (lambda b: train(engine_of(b), clip=1, norm_type="2"), "norm_type must be a positive"),
        (lambda b: engine_of(b)["u"], "this engine has no unit 'u'; it has u0, u1"),
        (lambda b: unknown_unit(b, "forward"), "this engine has no unit 'u7'; it has u0, u1"),
        (lambda b: unknown_unit(b, "backward"), "this engine has no unit 'u7'; it has u0, u1"),
        (lambda b: gathered(b)["v"], "unit 'u0' has no parameter 'v'; it has w, b, scale, none"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    error = cause_of(lambda backend: make(backend))
    assert isinstance(error, fc.ArgumentError)
    with pytest.raises(fc.ArgumentError, match=message):
        raise error


def test_ranks_with_different_initial_values_are_told_apart():
    def body(backend):
        values = np.full(3, backend.rank == 1, np.float32)
        fc.FSDP([fc.Unit("same", arrays()), fc.Unit("other", {"w": values})], backend)

    error = cause_of(body, 3)
    assert isinstance(error, fc.MismatchError)
    assert "unit 'other' differs" in str(error)
    assert "and rank 1;" in str(error)


def test_options_that_differ_between_ranks_are_refused():
    def seeds(backend):
        engine_of(backend, seed=backend.rank)

    def optimizers(backend):
        fc.FSDP([fc.Unit("u", arrays())], backend, optimizer=fc.optim.SGD(lr=1.0 + backend.rank))

    for body in (seeds, optimizers):
        error = cause_of(body, 2)
        assert isinstance(error, fc.MismatchError)
        assert (
            "the engine's options (strategy, optimizer, precision, compression, ...) differ"
            in str(error)
        )


def test_a_transposed_view_of_another_parameter_is_refused():
    table = np.ones((3, 5), np.float32)

    def body(backend):
        fc.FSDP([fc.Unit("a", {"w": table}), fc.Unit("b", {"v": table.T})], backend)

    assert "a.w and b.v are views of the same memory" in str(cause_of(body))


def test_a_wrong_optimizer_leaves_the_units_usable():
    def body(backend):
        units = [fc.Unit("u", arrays())]
        with pytest.raises(fc.ConfigError, match=r"must be one of fc\.optim"):
            fc.FSDP(units, backend, optimizer="adam")
        fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0))

    launch(body, 1)


# Options, which are checked before there is an engine.

BFLOAT16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fc.Strategy("zero9"),
            "unknown strategy 'zero9'; known: 'full_shard', 'shard_grad",
        ),
        (lambda: fc.Strategy(None), "unknown strategy None"),
        (lambda: fc.Strategy("hybrid_shard"), "hybrid_shard needs shard_group_size, the number of"),
        (
            lambda: fc.Strategy("full_shard", shard_group_size=2),
            "belongs to 'hybrid_shard', not to",
        ),
        (lambda: fc.Strategy("no_shard", shard_group_size=2), "not to 'no_shard'"),
        (
            lambda: fc.Strategy("hybrid_shard", shard_group_size=0),
            "shard_group_size must be at least 1, got 0",
        ),
        (
            lambda: fc.Strategy("hybrid_shard", shard_group_size=2.0),
            r"shard_group_size must be an integer, got 2\.0",
        ),
        (
            lambda: fc.Strategy("full_shard", reshard_after_forward=0),
            "reshard_after_forward must be at least 1, got 0",
        ),
        (
            lambda: fc.Strategy("full_shard", reshard_after_forward="never"),
            "reshard_after_forward must be an integer, got 'never'",
        ),
        (
            lambda: fc.Strategy("shard_grad_op", reshard_after_forward=False),
            "'shard_grad_op' keeps its parameters; reshard_after_forward belongs to 'full_shard'",
        ),
        (lambda: fc.Strategy("no_shard", reshard_after_forward=2), "'no_shard' keeps its"),
        (
            lambda: fc.Strategy("shard_optimizer", reshard_after_forward=2),
            "'shard_optimizer' keeps its",
        ),
        (
            lambda: fc.Strategy("shard_optimizer", shard_group_size=2),
            "shard_group_size belongs to 'hybrid_shard', not to 'shard_optimizer'",
        ),
        (
            lambda: fc.Strategy("hybrid_shard", shard_group_size=3).place(4),
            "shard_group_size 3 does not divide the 4 ranks",
        ),
        (
            lambda: fc.Strategy("full_shard", reshard_after_forward=4).place(6),
            "reshard_after_forward=4 does not divide the 6 ranks that share a copy",
        ),
        (
            lambda: fc.Strategy("hybrid_shard", 4, shard_group_size=2).place(4),
            "reshard_after_forward=4 does not divide the 2 ranks",
        ),
        (
            lambda: fc.Precision(np.int32),
            "param_dtype must be float16, bfloat16, float32 or float64",
        ),
        (lambda: fc.Precision(reduce_dtype=np.complex64), "reduce_dtype must be .*, got complex64"),
        (lambda: fc.Precision(ml_dtypes.float8_e4m3), "param_dtype must be .*, got float8_e4m3"),
        (
            lambda: fc.Precision("bf16"),
            "param_dtype has the dtype 'bf16', which NumPy does not know",
        ),
        (lambda: fc.Precision(loss_scale="dynamic"), "loss_scale must be a real number, got 'dyn"),
        (lambda: fc.Precision(loss_scale=True), "loss_scale must be a real number, got True"),
        (lambda: fc.Precision(loss_scale=0), "needs 0 < minimum <= initial <= maximum"),
        (lambda: fc.Precision(loss_scale=np.inf), "loss_scale must be finite"),
        (
            lambda: fc.Precision(np.float64).dtypes(np.dtype(np.float32)),
            "parameters of float32 cannot be computed in float64 or reduced in float64, which is "
            "wider; make the parameters of that dtype",
        ),
        (lambda: fc.LossScale(0.5), "initial <= maximum, got 1, 0.5 and"),
        (lambda: fc.LossScale(2.0, maximum=1.0), "initial <= maximum, got 1, 2 and 1"),
        (lambda: fc.LossScale(2.0**33), r"got 1, 8\.58993e\+09 and 4\.29497e\+09"),
        (lambda: fc.LossScale(minimum=0.0), "needs 0 < minimum"),
        (lambda: fc.LossScale(np.nan), "initial of LossScale must be finite"),
        (lambda: fc.LossScale(-1.0), "initial of LossScale must be at least 0"),
        (lambda: fc.LossScale(growth=0.5), "needs growth >= 1 and 0 < backoff <= 1"),
        (lambda: fc.LossScale(backoff=0.0), "needs growth >= 1 and 0 < backoff <= 1"),
        (lambda: fc.LossScale(backoff=1.5), "needs growth >= 1 and 0 < backoff <= 1"),
        (lambda: fc.LossScale(interval=0), "interval of LossScale must be at least 1, got 0"),
        (lambda: fc.LossScale(interval=2.5), "interval of LossScale must be an integer, got 2.5"),
        (lambda: fc.Prefetch(-1), "prefetch .in units. must be at least 0, got -1"),
        (lambda: fc.Prefetch(True), "prefetch .in units. must be an integer, got True"),
        (lambda: fc.Prefetch(max_bytes=0), "max_bytes of Prefetch must be at least 1, got 0"),
        (lambda: fc.Prefetch(max_bytes=1e6), "max_bytes of Prefetch must be an integer"),
        (lambda: fc.Prefetch(reductions=2), "reductions of Prefetch must be .*, got 2"),
        (lambda: fc.Unit(3, {}), "a unit's name must be a non-empty string, got 3"),
        (
            lambda: fc.Unit("u", {"w": np.zeros(3, BFLOAT16)}),
            r"u\.w has dtype bfloat16; parameters are float32 or float64, which the optimizer "
            r"updates\. To compute in less, pass the engine precision=fc\.Precision\(param_dtype",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(fc.ArgumentError, match=message):
        make()


def test_dtypes_wider_than_the_parameters_are_refused_by_the_engine():
    for precision in (fc.Precision(np.float64), fc.Precision(BFLOAT16, np.float64)):
        error = cause_of(lambda backend, p=precision: engine_of(backend, precision=p))
        assert isinstance(error, fc.ArgumentError)
        assert "parameters of float32 cannot be computed in" in str(error)


# Patterns for optimizers.

ADAM, SGD = fc.optim.Adam(lr=0.1), fc.optim.SGD(lr=0.1)


@pytest.mark.parametrize(
    ("optimizers", "error", "message"),
    [
        (
            {"*.bias": SGD, "*": ADAM},
            fc.ArgumentError,
            r"the pattern '\*\.bias' matches no parameter; .*named 'unit\.parameter': 'u0\.w', ",
        ),
        (
            {"u0.*": ADAM, "*.w": ADAM},
            fc.ArgumentError,
            r"no pattern matches the parameters 'u1\.b', 'u1\.scale', 'u1\.none'.*add '\*' as the",
        ),
        ({"U0.*": ADAM, "*": SGD}, fc.ArgumentError, r"the pattern 'U0\.\*' matches no parameter"),
        ({"*": ADAM, "*.w": SGD}, fc.ConfigError, r"'\*\.w' is never reached, as '\*' before it"),
        ({"*.w": 0.1}, fc.ConfigError, r"the optimizer for '\*\.w' must be one of fc\.optim"),
        ({3: ADAM}, fc.ConfigError, "a pattern must be a string such as"),
        ({}, fc.ConfigError, r"optimizers must be one of fc\.optim, such as fc\.optim\.AdamW"),
        (fc.optim.Adam, fc.ConfigError, r"; call what makes it, Adam\(\.\.\.\)"),
        ({"*": engine_of}, fc.ConfigError, r"; call what makes it, engine_of\(\.\.\.\)"),
        ([ADAM], fc.ConfigError, r"optimizers must be one of fc\.optim"),
    ],
)
def test_optimizers_that_fit_no_parameter_are_refused(optimizers, error, message):
    caught = cause_of(lambda backend: engine_of(backend, optimizer=optimizers))
    assert isinstance(caught, error)
    with pytest.raises(error, match=message):
        raise caught


def test_patterns_are_matched_with_what_is_trained():
    frozen = [fc.Unit("u", arrays(), frozen="b"), fc.Unit("v", {"b": fc.Tied("u", "w")})]
    error = cause_of(lambda backend: fc.FSDP(frozen, backend, optimizer={"*.b": SGD, "*": ADAM}), 1)
    assert isinstance(error, fc.ArgumentError)
    assert "the pattern '*.b' matches no parameter" in str(error)
