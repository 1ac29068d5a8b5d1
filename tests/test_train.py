"""Training resumes bit for bit after any kill, and learns the same on several processes."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import signal
import socket
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.optim import Muon

import farspan
from farspan.data.documents import read_documents
from farspan.errors import CorruptError, FarspanError, PreemptedError
from farspan.files import check_manifest
from farspan.signals import delay_signals
from farspan.train import checkpoint, loop, pretrain
from farspan.train.corpus import DataConfig, SourceConfig
from farspan.train.loop import train
from farspan.train.metadata import trained_with_passkeys, write_training_metadata
from farspan.train.optim import OptimizerConfig, StackedMuon, learning_rate
from farspan.train.pretrain import ModelShape, PretrainConfig, TrainConfig
from farspan.train.steps import EagerSteps, TrainingTask

STEPS = 12


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> PretrainConfig:
    """Two layers on Python's own reference: twelve steps in half a second."""
    folder = tmp_path_factory.mktemp("text")
    text = next(iter(read_documents("python-docs"))).text[:60_000]
    (folder / "docs.txt").write_text(text)
    return PretrainConfig(
        DataConfig(
            {"docs": SourceConfig("docs.txt", 1.0)},
            folder=str(folder),
            cache=str(folder / "cache"),
            vocabulary=300,
            passkey=0.0,
            processes=1,
        ),
        ModelShape(layers=2, width=32, heads=2, ff=64),
        TrainConfig(
            steps=STEPS,
            length=16,
            batch=4,
            micro_batch=2,
            save_every=3,
            keep_at=(0.2,),  # step 2
            log_every=3,
        ),
        OptimizerConfig(warmup=5),
    )


@pytest.fixture(scope="module")
def training_data(recipe):
    return pretrain.load_training_data(recipe)


@pytest.fixture(scope="module")
def uninterrupted(recipe, training_data, tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    pretrain.pretrain(recipe, run, training_data=training_data)
    return run


def outcome(run: Path, steps: int = STEPS) -> tuple[str, list[dict]]:
    """The hash of weights and optimizer state at the end, and the logged losses."""
    last = run / "checkpoints" / checkpoint.checkpoint_name(steps)
    content = b"".join(
        (last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return hashlib.sha256(content).hexdigest(), [
        {key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines
    ]


def with_train(recipe: PretrainConfig, **changes) -> PretrainConfig:
    return replace(recipe, train=replace(recipe.train, **changes))


def model_config(recipe: PretrainConfig, training_data):
    tokenizer = training_data.tokenizer
    return recipe.config(len(tokenizer), tokenizer.eos_token_id)


def make_task(recipe: PretrainConfig, training_data) -> TrainingTask:
    model = pretrain.build_model(recipe, model_config(recipe, training_data))
    return pretrain.make_training_task(recipe, model, training_data)


def forked(function) -> int:
    """Call a function in a forked process; returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        code = 1
        try:
            function()
            code = 0
        except FarspanError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_args, **_kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Kill and resume.


@pytest.mark.long
def test_a_run_killed_after_any_step_ends_in_the_same_bits(
    recipe, training_data, uninterrupted, tmp_path
):
    for boundary in range(STEPS):
        run = tmp_path / f"run-{boundary}"

        def run_until_killed(boundary=boundary, run=run) -> None:
            original = EagerSteps.update

            def update(self) -> None:
                original(self)
                update.calls += 1
                if update.calls == boundary + 1:
                    die()

            update.calls = 0
            EagerSteps.update = update
            pretrain.pretrain(recipe, run, training_data=training_data)

        assert forked(run_until_killed) == -signal.SIGKILL
        pretrain.pretrain(recipe, run, training_data=training_data)
        assert outcome(run) == outcome(uninterrupted), boundary


# Functions that saving calls, and which of their calls to interrupt: in the first save, in the
# second, and in one that removes an older checkpoint.
SAVE_CALLS = {
    "safetensors.torch.save_file": (1, 3, 8),
    "os.rename": (1, 3, 8),
    "os.fsync": (1, 3, 8, 21),
    "os.replace": (1, 3, 8),
    "shutil.rmtree": (1, 2, 3),
    "tempfile.mkdtemp": (1, 3, 6),
}


@contextmanager
def interrupted(name: str, number: int, action, *, before: bool):
    """Run an action before or after the numbered call of a function."""
    module_name, _, attribute = name.rpartition(".")
    module = sys.modules[module_name]
    original = getattr(module, attribute)
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number and before:
            action(*args, **kwargs)
        value = original(*args, **kwargs)
        if calls == number and not before:
            action(*args, **kwargs)
        return value

    setattr(module, attribute, call)
    try:
        yield
    finally:
        setattr(module, attribute, original)


QUICK_CALLS = ("os.replace",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_CALLS else pytest.mark.long)
        for name in SAVE_CALLS
    ],
)
@pytest.mark.long
def test_a_run_killed_during_a_save_ends_in_the_same_bits(
    recipe, training_data, uninterrupted, tmp_path, name
):
    recipe = with_train(recipe, save_every=2)
    for number in SAVE_CALLS[name]:
        for before in (True, False):
            run = tmp_path / f"{number}-{before}"

            def run_until_killed(number=number, before=before, run=run) -> None:
                with interrupted(name, number, die, before=before):
                    pretrain.pretrain(recipe, run, training_data=training_data)

            assert forked(run_until_killed) == -signal.SIGKILL
            pretrain.pretrain(recipe, run, training_data=training_data)
            assert outcome(run) == outcome(uninterrupted)
            assert not list((run / "checkpoints").glob(".*")), "leftovers are removed"


def random_fault(seed: int):
    """A short write, a full disk or a failing disk, at a random call of saving."""
    rng = random.Random(seed)
    kind = rng.choice(["short", "ENOSPC", "EIO"])

    def fail(*args, **_kwargs):
        if kind == "short" and len(args) > 1:  # save_file(tensors, path) wrote the file: cut it
            Path(args[1]).write_bytes(Path(args[1]).read_bytes()[: rng.randrange(1, 2000)])
            if rng.random() < 0.5:
                return
        raise OSError(errno.EIO if kind == "EIO" else errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = "safetensors.torch.save_file" if kind == "short" else rng.choice([*SAVE_CALLS][:4])
    return name, rng.randrange(1, 12), fail, kind != "short" and rng.random() < 0.5


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 100), marks=pytest.mark.long)])
@pytest.mark.long
def test_write_faults_leave_no_partial_checkpoint(recipe, training_data, tmp_path, seeds):
    """After every fault all checkpoints are intact, and finally the run ends in the same bits."""
    recipe = with_train(recipe, steps=50, save_every=1)
    pretrain.pretrain(
        with_train(recipe, save_every=50), tmp_path / "uninterrupted", training_data=training_data
    )
    expected, _ = outcome(tmp_path / "uninterrupted", 50)
    run = tmp_path / "run"
    failures, finished = 0, 0
    for seed in seeds:
        name, number, fail, before = random_fault(seed)
        try:
            with interrupted(name, number, fail, before=before):
                train(make_task(recipe, training_data), recipe.plan, run)
        except (FarspanError, OSError):
            failures += 1
        for folder in (run / "checkpoints").glob("step-*"):
            check_manifest(folder)
        if (run / "metrics.jsonl").exists():
            for line in (run / "metrics.jsonl").read_text().splitlines():
                json.loads(line)
        if (run / "checkpoints" / checkpoint.checkpoint_name(50)).exists():
            assert outcome(run, 50)[0] == expected
            finished += 1
            run = tmp_path / f"run-{seed}"  # start again
    assert failures >= 0.95 * len(seeds)
    assert finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_75_and_the_run_resumes(
    recipe, training_data, uninterrupted, tmp_path, number
):
    run = tmp_path / "run"

    def run_until_stopped() -> None:
        def on_step(metrics) -> None:
            if metrics.step == 6:
                os.kill(os.getpid(), number)

        # The background jobs of a shell ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pretrain.pretrain(recipe, run, training_data=training_data, on_step=on_step)

    assert forked(run_until_stopped) == PreemptedError.exit_code == 75
    assert checkpoint.latest(run).step == 7
    pretrain.pretrain(recipe, run, training_data=training_data)
    assert outcome(run) == outcome(uninterrupted)


def test_a_second_ctrl_c_stops_at_once_and_ignored_signals_stay_ignored(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), delay_signals() as stop_requested:
        signal.raise_signal(signal.SIGINT)
        assert stop_requested()
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: handlers.append(arguments))
    with delay_signals() as stop_requested:
        assert not stop_requested()
    assert not handlers


def test_only_one_command_at_a_time_trains_in_a_folder(
    recipe, training_data, tmp_path, monkeypatch
):
    run, exit_codes = tmp_path / "run", []
    save = checkpoint.save

    def save_while_another_starts(*args, **kwargs):
        exit_codes.append(
            forked(lambda: pretrain.pretrain(recipe, run, training_data=training_data))
        )
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", save_while_another_starts)
    pretrain.pretrain(recipe, run, training_data=training_data)
    assert set(exit_codes) == {FarspanError.exit_code}
    assert not (run / "lock").exists()


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    recipe, training_data, uninterrupted, tmp_path, caplog
):
    run = tmp_path / "run"
    pretrain.pretrain(recipe, run, training_data=training_data)
    last = run / "checkpoints" / checkpoint.checkpoint_name(STEPS)
    weights = bytearray((last / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (last / "model.safetensors").write_bytes(weights)
    pretrain.pretrain(recipe, run, training_data=training_data)
    assert outcome(run) == outcome(uninterrupted)
    assert "set aside" in caplog.text
    assert (run / "checkpoints" / f"broken-{last.name}").exists()
    assert (run / "checkpoints" / checkpoint.checkpoint_name(2)).exists(), (
        "the checkpoint at a fifth of the steps is kept"
    )
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(CorruptError, match="none of the 4 checkpoints"):
            pretrain.pretrain(recipe, run, training_data=training_data)


def test_a_checkpoint_loads_as_a_model(uninterrupted):
    model, tokenizer = farspan.load(uninterrupted / "checkpoints" / checkpoint.checkpoint_name(2))
    assert model.config.position == ["none", "none"]
    assert tokenizer.decode(tokenizer("def f():")["input_ids"]) == "def f():"


def test_files_of_a_run_keep_their_keys(recipe, training_data, uninterrupted):
    """Runs of earlier versions resume: the keys on disk are part of the format."""
    last = uninterrupted / "checkpoints" / checkpoint.checkpoint_name(STEPS)
    assert set(json.loads((last / "state.json").read_text())) == {"step", "calm"}
    entry = json.loads((uninterrupted / "metrics.jsonl").read_text().splitlines()[-1])
    keys = ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu"]
    assert list(entry) == keys
    hashed = f"# its first rows: {pretrain.hash_first_rows(training_data)}"
    assert (uninterrupted / "recipe.toml").read_text().splitlines()[-1] == hashed


# Divergence and refusals.


@pytest.mark.parametrize(
    ("parameter", "value", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", math.nan, "model.layers.1.mlp"),
        ("model.layers.0.self_attn.v_proj.weight", math.inf, "model.layers.0.self_attn"),
        ("model.embed_tokens.weight", 1e4, "model.norm"),
    ],
)
def test_a_diverged_loss_stops_the_run_and_names_the_layer(
    recipe, training_data, tmp_path, parameter, value, named
):
    run = tmp_path / "run"
    task = make_task(recipe, training_data)

    def poison(metrics) -> None:
        if metrics.step == 7:
            with torch.no_grad():
                weight = task.parameters[parameter]
                weight.mul_(value) if value == 1e4 else weight[0].fill_(value)

    with pytest.raises(
        FarspanError, match=f"diverged at step 8: .*{named}.*last good state"
    ) as caught:
        train(task, replace(recipe.plan, log_every=1), run, poison)
    assert caught.value.exit_code == 2
    assert checkpoint.latest(run).step == 6
    assert f"the last good state is in {checkpoint.latest(run).folder}; " in str(caught.value)


def test_a_plan_says_by_how_much_the_loss_of_a_step_may_exceed_the_others():
    assert loop._divergence(1.9, 1.0, 0.4, margin=1.0) == "the loss is 1.9 and was 0.4 on average"
    assert loop._divergence(1.7, 1.0, 0.4, margin=1.0) is None
    assert loop._divergence(1.9, 1.0, 0.4, margin=3.0) is None


def test_a_run_that_diverged_needs_a_new_folder(recipe, training_data, tmp_path, monkeypatch):
    """Before the first checkpoint nothing is kept, and another learning rate is another run."""
    problems = iter((None, "the loss is nan"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_divergence", lambda loss, norm, mean_loss, margin: next(problems))
        with pytest.raises(
            FarspanError, match="diverged at step 2: the loss is nan, first seen in "
        ) as caught:
            pretrain.pretrain(recipe, tmp_path / "run", training_data=training_data)
    assert str(caught.value).endswith(
        "there was no checkpoint yet; train again with a lower learning rate and another -o"
    )
    lower = replace(recipe, optimization=replace(recipe.optimization, lr=1e-4))
    with pytest.raises(FarspanError, match="holds another run"):
        pretrain.pretrain(lower, tmp_path / "run", training_data=training_data)
    pretrain.pretrain(lower, tmp_path / "another", training_data=training_data)


def test_weights_that_are_not_finite_are_never_saved(recipe, training_data, tmp_path):
    task = make_task(recipe, training_data)

    def poison(metrics) -> None:
        if metrics.step == 9:
            task.parameters["model.norm.weight"].data[0] = math.nan

    with pytest.raises(FarspanError, match="diverged at step 9: model.norm.weight is not finite"):
        train(task, recipe.plan, tmp_path / "run", poison)
    assert checkpoint.latest(tmp_path / "run").step == 6


def test_a_gradient_that_is_not_finite_never_changes_the_weights(recipe, training_data, tmp_path):
    task = make_task(recipe, training_data)
    weight = task.parameters["model.norm.weight"]
    before = {name: parameter.detach().clone() for name, parameter in task.parameters.items()}
    weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(
        FarspanError, match="the gradient norm is nan, first seen in model.norm.weight"
    ):
        train(task, recipe.plan, tmp_path / "run")
    assert all(torch.equal(before[name], parameter) for name, parameter in task.parameters.items())


def test_a_folder_of_another_recipe_is_refused_by_the_key_that_differs(
    recipe, training_data, tmp_path
):
    run = tmp_path / "run"
    short = with_train(recipe, steps=5)
    pretrain.pretrain(short, run, training_data=training_data)
    with pytest.raises(
        FarspanError, match=r"model.ff is 64 there and 96 here; choose another folder"
    ):
        wider = replace(short, model=replace(recipe.model, ff=96))
        pretrain.pretrain(wider, run, training_data=training_data)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FarspanError, match="is not empty and holds no run"):
        pretrain.pretrain(recipe, tmp_path / "other", training_data=training_data)
    # Splitting the batch in another way is the same run.
    pretrain.pretrain(
        with_train(short, micro_batch=4, save_every=1), run, training_data=training_data
    )


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(
    recipe, training_data, tmp_path
):
    run = tmp_path / "run"
    pretrain.pretrain(with_train(recipe, steps=5), run, training_data=training_data)
    wider = replace(recipe, model=replace(recipe.model, ff=96))
    model = pretrain.build_model(wider, model_config(wider, training_data))
    before = model.model.embed_tokens.weight.detach().clone()
    with pytest.raises(
        FarspanError,
        match=r"is of another model: .*mlp.*shape \[64, 32\] there and has shape \[96, 32\]",
    ):
        train(pretrain.make_training_task(wider, model, training_data), wider.plan, run)
    assert torch.equal(before, model.model.embed_tokens.weight)
    start = run / "checkpoints" / checkpoint.checkpoint_name(5)
    with pytest.raises(FarspanError, match="is of another model"):
        pretrain.build_model(replace(wider, from_=str(start)), model.config)


def test_a_full_disk_is_reported_in_one_sentence(recipe, training_data, tmp_path):
    def fail(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        interrupted("safetensors.torch.save_file", 1, fail, before=True),
        pytest.raises(
            FarspanError, match=r"cannot be written \(No space left on device\); free some space"
        ) as caught,
    ):
        pretrain.pretrain(recipe, tmp_path / "run", training_data=training_data)
    assert caught.value.exit_code == 2
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_drope_starts_from_the_weights_of_the_rope_model(recipe, training_data, tmp_path):
    rope = with_train(replace(recipe, model=replace(recipe.model, position="rope")), steps=5)
    pretrain.pretrain(rope, tmp_path / "rope", training_data=training_data)
    start = tmp_path / "rope" / "checkpoints" / checkpoint.checkpoint_name(5)
    dropped = with_train(replace(recipe, from_=str(start)), steps=1)
    config = model_config(dropped, training_data)
    assert config.position == ["none", "none"]
    loaded = pretrain.build_model(dropped, config).state_dict()
    trained = farspan.load(start).model.state_dict()
    assert all(torch.equal(loaded[name], trained[name]) for name in loaded)


# Several processes.


def in_processes(count: int, function, tmp_path: Path) -> None:
    """Call function(rank) in `count` forked processes of a gloo group; all must succeed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                os.environ.update(
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    ACCELERATE_USE_CPU="true",
                    WORLD_SIZE=str(count),
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                )
                PartialState._reset_state()
                AcceleratorState._reset_state(reset_partial_state=True)
                assert PartialState(cpu=True, backend="gloo").num_processes == count
                function(rank)
                code = 0
            except BaseException:
                import traceback

                (tmp_path / f"error-{rank}.txt").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = "\n".join(path.read_text() for path in sorted(tmp_path.glob("error-*.txt")))
    assert codes == [0] * count, errors


@pytest.mark.parametrize(
    ("count", "parallel", "optimizer"),
    [
        (2, "ddp", "muon"),
        pytest.param(2, "ddp", "adamw", marks=pytest.mark.long),
        pytest.param(2, "fsdp", "adamw", marks=pytest.mark.long),
        pytest.param(2, "fsdp", "muon", marks=pytest.mark.long),
        pytest.param(4, "ddp", "muon", marks=pytest.mark.long),
        pytest.param(4, "fsdp", "adamw", marks=pytest.mark.long),
    ],
)
def test_processes_learn_the_same_as_one(
    recipe, training_data, tmp_path, count, parallel, optimizer
):
    """The same gradient at the first step, and the same losses and weights after ten."""
    optimization = replace(recipe.optimization, optimizer=optimizer)
    recipe = with_train(
        replace(recipe, optimization=optimization), steps=10, micro_batch=1, log_every=1
    )
    single = make_task(recipe, training_data)
    EagerSteps(single, clip=0.0).gradients(single.batches(0))
    save_file(
        {name: parameter.grad for name, parameter in single.parameters.items()},
        tmp_path / "single.safetensors",
    )
    pretrain.pretrain(recipe, tmp_path / "one", training_data=training_data)
    parallel_recipe = with_train(recipe, parallel=parallel)

    def train_distributed(rank: int) -> None:
        distributed = make_task(parallel_recipe, training_data)
        sharded = [isinstance(parameter, DTensor) for parameter in distributed.parameters.values()]
        assert all(sharded) if parallel == "fsdp" else not any(sharded)
        EagerSteps(distributed, clip=0.0).gradients(distributed.batches(0))
        expected = load_file(tmp_path / "single.safetensors")
        for name, parameter in distributed.parameters.items():
            grad = parameter.grad.full_tensor() if parallel == "fsdp" else parameter.grad
            assert (grad - expected[name]).abs().max() <= 1e-6, name
        pretrain.pretrain(parallel_recipe, tmp_path / "many", training_data=training_data)

    in_processes(count, train_distributed, tmp_path)
    one, many = (read_losses(tmp_path / name) for name in ("one", "many"))
    assert many == pytest.approx(one, abs=1e-5)
    weights = [
        farspan.load(
            tmp_path / name / "checkpoints" / checkpoint.checkpoint_name(10)
        ).model.state_dict()
        for name in ("one", "many")
    ]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-4 for name in weights[0])


def read_losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_sharded_runs_resume_bit_for_bit(recipe, training_data, tmp_path):
    sharded = with_train(recipe, steps=10, parallel="fsdp")

    def train_uninterrupted(rank: int) -> None:
        pretrain.pretrain(sharded, tmp_path / "uninterrupted", training_data=training_data)

    def train_until_stopped(rank: int) -> None:
        def on_step(metrics) -> None:
            if metrics.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(PreemptedError):
            pretrain.pretrain(
                sharded,
                tmp_path / "stopped",
                training_data=training_data,
                on_step=on_step if rank == 0 else print,
            )

    def resume(rank: int) -> None:
        pretrain.pretrain(sharded, tmp_path / "stopped", training_data=training_data)

    for function in (train_uninterrupted, train_until_stopped, resume):
        in_processes(2, function, tmp_path)
    last = [
        tmp_path / name / "checkpoints" / checkpoint.checkpoint_name(10)
        for name in ("uninterrupted", "stopped")
    ]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes()


# Optimization.


def test_learning_rate_schedules():
    linear = OptimizerConfig(warmup=10, schedule="linear", decay=0.5, floor=0.1)
    multipliers = [learning_rate(step, 100, linear) for step in (0, 4, 9, 10, 50)]
    assert multipliers == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert learning_rate(75, 100, linear) == pytest.approx(0.1 + 0.9 / 2)
    assert learning_rate(100, 100, linear) == pytest.approx(0.1)
    cosine = OptimizerConfig(warmup=10, schedule="cosine", floor=0.1)
    assert learning_rate(10, 110, cosine) == 1.0
    assert learning_rate(60, 110, cosine) == pytest.approx(0.55)
    assert learning_rate(110, 110, cosine) == pytest.approx(0.1)
    assert learning_rate(1000, 110, OptimizerConfig(warmup=0, schedule="constant")) == 1.0
    for wrong in ({"optimizer": "sgd"}, {"schedule": "step"}, {"decay": 2.0}, {"beta2": 2.0}):
        with pytest.raises(FarspanError, match="choose"):
            OptimizerConfig(**wrong)
    with pytest.raises(FarspanError, match="lr is -1; choose 0 or more"):
        OptimizerConfig(lr=-1.0)


def test_stacked_muon_equals_torch_muon():
    """Equal momentum; equal directions up to bf16, in which torch computes on every device."""
    torch.manual_seed(0)
    shapes = [(24, 16), (24, 16), (16, 24), (16, 16)]
    ours, theirs = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    stacked, reference = StackedMuon(ours, 0.02, 0.05), Muon(theirs, 0.02, 0.05)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn_like(one)
        stacked.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(
            stacked.state[one]["momentum_buffer"], reference.state[other]["momentum_buffer"]
        )
        assert (one - other).norm() < 0.02 * other.norm()


def test_adamw_trains_embeddings_and_vectors_without_weight_decay(recipe):
    learned = replace(recipe, model=replace(recipe.model, position="learned", table=64))
    model = pretrain.build_model(learned, learned.config(300))
    assert model.model.positions["learned"].table.num_embeddings == 64
    muon, adamw = pretrain.make_optimizers(model, learned.optimization)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(parameter)] for parameter in muon.param_groups[0]["params"]}
    assert len(matrices) == 2 * 7
    assert all("proj" in name for name in matrices)
    assert adamw.param_groups[0]["weight_decay"] == 0.0
    untied = replace(recipe, model=replace(recipe.model, tied=False))
    untied_model = pretrain.build_model(untied, untied.config(300))
    muon, _ = pretrain.make_optimizers(untied_model, untied.optimization)
    assert all(
        parameter is not untied_model.lm_head.weight for parameter in muon.param_groups[0]["params"]
    )
    only_adamw = OptimizerConfig(optimizer="adamw", weight_decay=0.1)
    (optimizer,) = pretrain.make_optimizers(model, only_adamw)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_accumulated_gradients_equal_those_of_the_whole_batch(recipe, training_data):
    results = []
    for rows in (1, 2, 4):
        task = make_task(with_train(recipe, micro_batch=rows), training_data)
        assert len(task.batches(0)) == 4 // rows
        loss, norm = EagerSteps(task, clip=0.0).gradients(task.batches(0))
        results.append((loss, norm, *(parameter.grad for parameter in task.parameters.values())))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.allclose(one, two, atol=1e-6)
    with pytest.raises(
        FarspanError, match="not a multiple of train.micro_batch=3; choose a divisor of 4"
    ):
        pretrain.batch_split(replace(recipe.train, micro_batch=3), 1)
    with pytest.raises(FarspanError, match="cannot be split over 3 processes"):
        pretrain.batch_split(recipe.train, 3)


def test_clipping_limits_the_gradient_and_returns_the_norm_before(recipe, training_data):
    task = make_task(recipe, training_data)
    _, norm = EagerSteps(task, clip=1e-3).gradients(task.batches(0))
    clipped = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in task.parameters.values()]
    )
    assert norm > 0.1
    assert clipped == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.long
def test_the_loss_decreases(recipe, training_data, tmp_path):
    longer = with_train(recipe, steps=50, save_every=50)
    pretrain.pretrain(longer, tmp_path / "run", training_data=training_data)
    losses = read_losses(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.5


# Training data.


def test_refuses_text_that_cannot_be_trained_on(recipe, tmp_path):
    def load(**changes):
        data = replace(recipe.data, cache=str(tmp_path / "cache"), **changes)
        return pretrain.load_training_data(replace(recipe, data=data))

    with pytest.raises(FarspanError, match="has no nothing.txt for data.sources.docs; set the"):
        load(sources={"docs": SourceConfig("nothing.txt", 1.0)})
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(FarspanError, match="no text to train a tokenizer on"):
        load(folder=str(tmp_path), sources={"docs": SourceConfig("empty.txt", 1.0)})
    with pytest.raises(FarspanError, match="holds no tokenizer.json"):
        load(tokenizer=str(tmp_path))
    assert not (tmp_path / "cache").exists()
    shards = load().mixture.sources[0].shards
    file = shards.folder / "tokens-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="is damaged: its SHA-256") as caught:
        load()
    assert caught.value.exit_code == 4
    with pytest.raises(FarspanError, match="was packed with the tokenizer"):
        from farspan.data.shards import open_shards
        from farspan.data.tokens import train_tokenizer

        open_shards(shards.folder, train_tokenizer(["other text"], 270))


def test_uses_the_tokenizer_of_the_recipe(recipe, training_data, tmp_path):
    training_data.tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = replace(recipe.data, tokenizer=str(tmp_path / "tokenizer"))
    again = pretrain.load_training_data(replace(recipe, data=data))
    assert torch.equal(again.mixture.rows(0, 4), training_data.mixture.rows(0, 4))


def test_rows_do_not_depend_on_position_encoding_or_steps(recipe, training_data):
    """Models that are compared see the same rows in the same order."""
    other = with_train(replace(recipe, model=replace(recipe.model, position="rope")), steps=7)
    rows = pretrain.load_training_data(other).mixture.rows(100, 8)
    assert torch.equal(rows, training_data.mixture.rows(100, 8))


def test_out_of_memory_suggests_a_smaller_micro_batch(recipe, training_data, tmp_path, monkeypatch):
    def run_out_of_memory(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pretrain, "train", run_out_of_memory)
    with pytest.raises(
        FarspanError, match="out of memory with a micro batch of 2 rows; .* train.micro_batch=1"
    ):
        pretrain.pretrain(recipe, tmp_path / "run", training_data=training_data)


# Metadata of finished models.


def test_training_metadata_says_whether_passkeys_were_trained_on(tmp_path):
    assert trained_with_passkeys(tmp_path) is None
    assert trained_with_passkeys(tmp_path / "absent") is None
    for passkeys in (True, False):
        write_training_metadata(tmp_path, passkey_documents=passkeys)
        assert trained_with_passkeys(tmp_path) is passkeys


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"passkey_documents": "often"}'])
def test_training_metadata_of_another_program_is_ignored(tmp_path, content):
    (tmp_path / "training.json").write_text(content)
    assert trained_with_passkeys(tmp_path) is None


@pytest.mark.parametrize(
    ("sentence", "passkeys"),
    [
        ("**Passkey documents were trained on**: 5% of the rows begin with one", True),
        ("No passkey documents were trained on.", False),
        ("A model of another program.", None),
    ],
)
def test_model_cards_of_earlier_versions_are_understood(tmp_path, sentence, passkeys):
    (tmp_path / "README.md").write_text(f"# A model\n\n{sentence}\n")
    assert trained_with_passkeys(tmp_path) is passkeys
