"""The loop keeps its word: killed anywhere it goes on bit for bit, spread over processes it learns the same."""

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
from farspan.signals import held
from farspan.train import checkpoint, loop, pretrain
from farspan.train.corpus import Data, Texts
from farspan.train.loop import train
from farspan.train.optim import Optimization, StackedMuon, rate
from farspan.train.pretrain import Pretraining, Shape, Training
from farspan.train.steps import Steps

STEPS = 50


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Pretraining:
    """Two layers on Python's own reference: fifty steps in half a second."""
    folder = tmp_path_factory.mktemp("text")
    text = next(iter(read_documents("python-docs"))).text[:60_000]
    (folder / "docs.txt").write_text(text)
    return Pretraining(
        Data(
            {"docs": Texts("docs.txt", 1.0)},
            folder=str(folder),
            cache=str(folder / "cache"),
            vocabulary=300,
            passkey=0.0,
            processes=1,
        ),
        Shape(layers=2, width=32, heads=2, ff=64),
        Training(steps=STEPS, length=16, batch=4, micro_batch=2, save_every=5, keep_at=(0.2,), log_every=5),
        Optimization(warmup=5),
    )


@pytest.fixture(scope="module")
def prepared(recipe):
    return pretrain.prepared_for(recipe)


@pytest.fixture(scope="module")
def straight(recipe, prepared, tmp_path_factory) -> tuple[str, list[dict]]:
    """What a run that nobody disturbs comes to."""
    run = tmp_path_factory.mktemp("straight") / "run"
    pretrain.pretrain(recipe, run, prepared=prepared)
    return outcome(run)


def outcome(run: Path) -> tuple[str, list[dict]]:
    """The bits of weights and optimizer, and the losses on the way."""
    last = run / "checkpoints" / checkpoint.name_of(STEPS)
    bits = b"".join((last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return hashlib.sha256(bits).hexdigest(), [
        {key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines
    ]


def forked(work) -> int:
    """Run in a child of this process, where everything is imported; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        code = 1
        try:
            work()
            code = 0
        except FarspanError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_args, **_kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Killed and resumed.


def test_killed_at_every_step_boundary_it_ends_in_the_same_bits(recipe, prepared, straight, tmp_path):
    for boundary in range(STEPS):
        run = tmp_path / f"run-{boundary}"

        def killed(boundary=boundary, run=run) -> None:
            taken = Steps.update

            def update(self) -> None:
                taken(self)
                update.calls += 1
                if update.calls == boundary + 1:
                    die()

            update.calls = 0
            Steps.update = update
            pretrain.pretrain(recipe, run, prepared=prepared)

        assert forked(killed) == -signal.SIGKILL
        assert forked(lambda run=run: pretrain.pretrain(recipe, run, prepared=prepared)) == 0
        assert outcome(run) == straight, boundary


SAVING = ("safetensors.torch.save_file", "os.rename", "os.fsync", "os.replace", "shutil.rmtree", "tempfile.mkdtemp")


@contextmanager
def sabotaged(name: str, number: int, act, *, before: bool):
    """Let the given call of a function that saving uses be struck, before or after it did its work."""
    module_name, _, attribute = name.rpartition(".")
    module = sys.modules[module_name]
    true = getattr(module, attribute)
    calls = 0

    def struck(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number and before:
            act(*args, **kwargs)
        result = true(*args, **kwargs)
        if calls == number and not before:
            act(*args, **kwargs)
        return result

    setattr(module, attribute, struck)
    try:
        yield
    finally:
        setattr(module, attribute, true)


@pytest.mark.parametrize("name", SAVING)
def test_killed_in_the_middle_of_a_save_it_ends_in_the_same_bits(recipe, prepared, straight, tmp_path, name):
    struck = 0
    for number in (1, 3, 8, 21):
        for before in (True, False):
            run = tmp_path / f"{number}-{before}"

            def killed(number=number, before=before, run=run) -> None:
                with sabotaged(name, number, die, before=before):
                    pretrain.pretrain(recipe, run, prepared=prepared)

            struck += forked(killed) == -signal.SIGKILL
            assert forked(lambda run=run: pretrain.pretrain(recipe, run, prepared=prepared)) == 0
            assert outcome(run) == straight
            assert not list((run / "checkpoints").glob(".*")), "what was half-written is swept away"
    assert struck >= 4


def faults(seed: int):
    """A short write, a full disk or a failing one, at a place that saving comes by."""
    rng = random.Random(seed)
    kind = rng.choice(["short", "ENOSPC", "EIO"])

    def fail(*args, **_kwargs):
        if kind == "short" and len(args) > 1:  # save_file(tensors, path): the file is there, and not whole
            Path(args[1]).write_bytes(Path(args[1]).read_bytes()[: rng.randrange(1, 2000)])
            if rng.random() < 0.5:
                return
        raise OSError(errno.EIO if kind == "EIO" else errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = "safetensors.torch.save_file" if kind == "short" else rng.choice(SAVING[:4])
    return name, rng.randrange(1, 12), fail, kind != "short" and rng.random() < 0.5


def test_two_hundred_faults_leave_nothing_half_written(recipe, prepared, straight, tmp_path):
    """After each fault all that has a final name is whole, and at last the run comes to its end."""
    run = tmp_path / "run"
    plan = replace(recipe.plan, save_every=1)
    struck = 0
    for seed in range(200):
        model = pretrain.build(recipe, recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id))
        work = pretrain.pretraining(recipe, model, prepared)
        name, number, fail, before = faults(seed)
        few = replace(plan, steps=STEPS)
        try:
            with sabotaged(name, number, fail, before=before):
                train(work, few, run)
        except (FarspanError, OSError):
            struck += 1
        for folder in (run / "checkpoints").glob("step-*"):
            checkpoint.check_manifest(folder)
        for line in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []:
            json.loads(line)
        if (run / "checkpoints" / checkpoint.name_of(STEPS)).exists():
            assert outcome(run)[0] == straight[0]
            run = tmp_path / f"run-{seed}"  # and once more from the beginning
    assert struck >= 190


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_exits_75_and_the_same_command_goes_on(recipe, prepared, straight, tmp_path, number):
    run = tmp_path / "run"

    def stopped() -> None:
        def listen(moment) -> None:
            if moment.step == 20:
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        pretrain.pretrain(recipe, run, prepared=prepared, listen=listen)

    assert forked(stopped) == PreemptedError.exit_code == 75
    assert checkpoint.newest(run).step == 21
    pretrain.pretrain(recipe, run, prepared=prepared)
    assert outcome(run) == straight


def test_asked_twice_it_stops_at_once_and_what_is_ignored_stays_ignored(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), held() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked()
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda *given: handlers.append(given))
    with held() as asked:
        assert not asked()
    assert not handlers


def test_one_command_at_a_time_trains_in_a_folder(recipe, prepared, tmp_path, monkeypatch):
    run, refused = tmp_path / "run", []
    save = checkpoint.save

    def meanwhile(*args, **kwargs):
        refused.append(forked(lambda: pretrain.pretrain(recipe, run, prepared=prepared)))
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", meanwhile)
    pretrain.pretrain(recipe, run, prepared=prepared)
    assert set(refused) == {FarspanError.exit_code}
    assert not (run / "lock").exists()


def test_a_decayed_checkpoint_is_set_aside_for_the_one_before(recipe, prepared, straight, tmp_path, caplog):
    run = tmp_path / "run"
    pretrain.pretrain(recipe, run, prepared=prepared)
    last = run / "checkpoints" / checkpoint.name_of(STEPS)
    weights = bytearray((last / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (last / "model.safetensors").write_bytes(weights)
    pretrain.pretrain(recipe, run, prepared=prepared)
    assert outcome(run) == straight
    assert "set aside" in caplog.text
    assert (run / "checkpoints" / f"broken-{last.name}").exists()
    assert (run / "checkpoints" / checkpoint.name_of(10)).exists(), "a fifth of the steps is kept"
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(CorruptError, match="none of the 4 checkpoints"):
            pretrain.pretrain(recipe, run, prepared=prepared)


def test_checkpoints_are_models(recipe, prepared, straight, tmp_path):
    pretrain.pretrain(recipe, tmp_path / "run", prepared=prepared)
    model, tokenizer = farspan.load(tmp_path / "run" / "checkpoints" / checkpoint.name_of(10))
    assert model.config.position == ["none", "none"]
    assert tokenizer.decode(tokenizer("def f():")["input_ids"]) == "def f():"


# Going wrong.


@pytest.mark.parametrize(
    ("parameter", "value", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", math.nan, "model.layers.1.mlp"),
        ("model.layers.0.self_attn.v_proj.weight", math.inf, "model.layers.0.self_attn"),
        ("model.embed_tokens.weight", 1e4, "model.norm"),
    ],
)
def test_a_loss_that_is_no_number_or_runs_away_stops_at_once_and_names_the_layer(
    recipe, prepared, tmp_path, parameter, value, named
):
    run = tmp_path / "run"
    model = pretrain.build(recipe, recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id))
    work = pretrain.pretraining(recipe, model, prepared)

    def poison(moment) -> None:
        if moment.step == 22:
            with torch.no_grad():
                work.trained[parameter].mul_(value) if value == 1e4 else work.trained[parameter][0].fill_(value)

    with pytest.raises(FarspanError, match=f"diverged at step 23: .*{named}.*last good state") as caught:
        train(work, replace(recipe.plan, log_every=1), run, poison)
    assert caught.value.exit_code == 2
    assert checkpoint.newest(run).step == 20
    assert f"the last good state is in {checkpoint.newest(run).folder}; " in str(caught.value)


def test_a_run_that_diverged_is_told_what_can_be_done(recipe, prepared, tmp_path, monkeypatch):
    """Before the first checkpoint nothing is kept, and another learning rate is another run, in another folder."""
    troubles = iter((None, "the loss is nan"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_trouble", lambda loss, norm, calm: next(troubles))
        with pytest.raises(FarspanError, match="diverged at step 2: the loss is nan, first seen in ") as caught:
            pretrain.pretrain(recipe, tmp_path / "run", prepared=prepared)
    assert str(caught.value).endswith(
        "no state of it is kept, for there was no checkpoint yet; train again with a lower learning rate and another -o"
    )
    lower = replace(recipe, optimization=replace(recipe.optimization, lr=1e-4))
    with pytest.raises(FarspanError, match="holds another run"):
        pretrain.pretrain(lower, tmp_path / "run", prepared=prepared)
    pretrain.pretrain(lower, tmp_path / "another", prepared=prepared)


def test_weights_that_are_no_numbers_are_never_saved(recipe, prepared, tmp_path):
    model = pretrain.build(recipe, recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id))
    work = pretrain.pretraining(recipe, model, prepared)

    def poison(moment) -> None:
        if moment.step == 20:
            work.trained["model.norm.weight"].data[0] = math.nan

    with pytest.raises(FarspanError, match="diverged at step 20: model.norm.weight is not finite"):
        train(work, recipe.plan, tmp_path / "run", poison)
    assert checkpoint.newest(tmp_path / "run").step == 15


def test_no_gradient_that_is_no_number_touches_the_weights(recipe, prepared, tmp_path):
    model = pretrain.build(recipe, recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id))
    work = pretrain.pretraining(recipe, model, prepared)
    weight = work.trained["model.norm.weight"]
    before = {name: parameter.detach().clone() for name, parameter in work.trained.items()}
    weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(FarspanError, match="the gradient's norm is nan, first seen in model.norm.weight"):
        train(work, recipe.plan, tmp_path / "run")
    assert all(torch.equal(before[name], parameter) for name, parameter in work.trained.items())


def test_a_folder_of_another_recipe_is_refused_by_the_key_that_differs(recipe, prepared, tmp_path):
    run = tmp_path / "run"
    pretrain.pretrain(replace(recipe, train=replace(recipe.train, steps=5)), run, prepared=prepared)
    other = replace(recipe, train=replace(recipe.train, steps=5), model=replace(recipe.model, ff=96))
    with pytest.raises(FarspanError, match=r"model.ff is 64 there and 96 here; choose another folder"):
        pretrain.pretrain(other, run, prepared=prepared)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FarspanError, match="is not empty and holds no run"):
        pretrain.pretrain(recipe, tmp_path / "other", prepared=prepared)
    spread = replace(recipe, train=replace(recipe.train, steps=5, micro_batch=4, save_every=1))
    pretrain.pretrain(spread, run, prepared=prepared)  # how the work is cut is no other run


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(recipe, prepared, tmp_path):
    pretrain.pretrain(replace(recipe, train=replace(recipe.train, steps=5)), tmp_path / "run", prepared=prepared)
    wider = replace(recipe, model=replace(recipe.model, ff=96))
    model = pretrain.build(wider, wider.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id))
    before = model.model.embed_tokens.weight.detach().clone()
    with pytest.raises(
        FarspanError, match=r"is of another model: .*mlp.*shape \[64, 32\] there and has shape \[96, 32\]"
    ):
        train(pretrain.pretraining(wider, model, prepared), wider.plan, tmp_path / "run")
    assert torch.equal(before, model.model.embed_tokens.weight)
    with pytest.raises(FarspanError, match="is of another model"):
        pretrain.build(
            replace(wider, from_=str(tmp_path / "run" / "checkpoints" / checkpoint.name_of(5))), model.config
        )


def test_a_full_disk_is_one_sentence(recipe, prepared, tmp_path):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        sabotaged("safetensors.torch.save_file", 1, full, before=True),
        pytest.raises(FarspanError, match=r"cannot be written \(No space left on device\); free some space") as caught,
    ):
        pretrain.pretrain(recipe, tmp_path / "run", prepared=prepared)
    assert caught.value.exit_code == 2
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_rope_dropped_and_recalibrated_starts_from_the_other_weights(recipe, prepared, tmp_path):
    rope = replace(recipe, model=replace(recipe.model, position="rope"), train=replace(recipe.train, steps=5))
    pretrain.pretrain(rope, tmp_path / "rope", prepared=prepared)
    start = tmp_path / "rope" / "checkpoints" / checkpoint.name_of(5)
    dropped = replace(recipe, from_=str(start), train=replace(recipe.train, steps=1))
    config = dropped.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id)
    assert config.position == ["none", "none"]
    loaded, trained = pretrain.build(dropped, config).state_dict(), farspan.load(start).model.state_dict()
    assert all(torch.equal(loaded[name], trained[name]) for name in loaded)


# Several processes.


def in_processes(count: int, work, tmp_path: Path) -> None:
    """Fork `count` processes that form a gloo group, and wait until each has ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
                os.environ.update(where, WORLD_SIZE=str(count), RANK=str(rank), LOCAL_RANK=str(rank))
                PartialState._reset_state()
                AcceleratorState._reset_state(reset_partial_state=True)
                assert PartialState(cpu=True, backend="gloo").num_processes == count
                work(rank)
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(recipe, prepared, straight, tmp_path, parallel, optimizer):
    """The gradient of the first step, the losses of twenty, and a run that goes on from one process to two."""
    how = replace(recipe.optimization, optimizer=optimizer)
    recipe = replace(recipe, optimization=how, train=replace(recipe.train, steps=20, micro_batch=1))
    config = recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id)
    alone = pretrain.pretraining(recipe, pretrain.build(recipe, config), prepared)
    Steps(alone, clip=0.0).gradients(alone.batches(0))
    save_file({name: parameter.grad for name, parameter in alone.trained.items()}, tmp_path / "alone.safetensors")
    pretrain.pretrain(recipe, tmp_path / "one", prepared=prepared)
    spread = replace(recipe, train=replace(recipe.train, parallel=parallel))

    def work(rank: int) -> None:
        together = pretrain.pretraining(spread, pretrain.build(spread, config), prepared)
        sharded = [isinstance(parameter, DTensor) for parameter in together.trained.values()]
        assert all(sharded) if parallel == "fsdp" else not any(sharded)
        Steps(together, clip=0.0).gradients(together.batches(0))
        expected = load_file(tmp_path / "alone.safetensors")
        for name, parameter in together.trained.items():
            grad = parameter.grad.full_tensor() if parallel == "fsdp" else parameter.grad
            assert (grad - expected[name]).abs().max() <= 1e-6, name
        pretrain.pretrain(spread, tmp_path / "two", prepared=prepared)

    in_processes(2, work, tmp_path)
    one, two = (read_losses(tmp_path / name) for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)
    weights = [
        farspan.load(tmp_path / name / "checkpoints" / checkpoint.name_of(20)).model.state_dict()
        for name in ("one", "two")
    ]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-4 for name in weights[0])


def read_losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_sharded_runs_resume_bit_for_bit(recipe, prepared, tmp_path):
    spread = replace(recipe, train=replace(recipe.train, steps=20, parallel="fsdp"))

    def once(rank: int) -> None:
        pretrain.pretrain(spread, tmp_path / "straight", prepared=prepared)

    def stopped(rank: int) -> None:
        def listen(moment) -> None:
            if moment.step == 10:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(PreemptedError):
            pretrain.pretrain(spread, tmp_path / "stopped", prepared=prepared, listen=listen if rank == 0 else print)

    def resumed(rank: int) -> None:
        pretrain.pretrain(spread, tmp_path / "stopped", prepared=prepared)

    for work in (once, stopped, resumed):
        in_processes(2, work, tmp_path)
    last = [tmp_path / name / "checkpoints" / checkpoint.name_of(20) for name in ("straight", "stopped")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes()


# Learning.


def test_schedules():
    linear = Optimization(warmup=10, schedule="linear", decay=0.5, floor=0.1)
    assert [rate(step, 100, linear) for step in (0, 4, 9, 10, 50)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert rate(75, 100, linear) == pytest.approx(0.1 + 0.9 / 2)
    assert rate(100, 100, linear) == pytest.approx(0.1)
    cosine = Optimization(warmup=10, schedule="cosine", floor=0.1)
    assert rate(10, 110, cosine) == 1.0
    assert rate(60, 110, cosine) == pytest.approx(0.55)
    assert rate(110, 110, cosine) == pytest.approx(0.1)
    assert rate(1000, 110, Optimization(warmup=0, schedule="constant")) == 1.0
    for wrong in ({"optimizer": "sgd"}, {"schedule": "step"}, {"decay": 2.0}, {"beta2": 2.0}):
        with pytest.raises(FarspanError, match="choose"):
            Optimization(**wrong)
    with pytest.raises(FarspanError, match="lr is -1; it cannot be less than 0"):
        Optimization(lr=-1.0)


def test_stacked_muon_is_torchs_muon():
    """Its momentum exactly, its directions up to bf16, in which torch works on every device."""
    torch.manual_seed(0)
    shapes = [(24, 16), (24, 16), (16, 24), (16, 16)]
    ours, theirs = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    stacked, own = StackedMuon(ours, 0.02, 0.05), Muon(theirs, 0.02, 0.05)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn_like(one)
        stacked.step()
        own.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(stacked.state[one]["momentum_buffer"], own.state[other]["momentum_buffer"])
        assert (one - other).norm() < 0.02 * other.norm()


def test_tables_and_vectors_are_left_to_adamw_and_never_decayed(recipe):
    learned = replace(recipe, model=replace(recipe.model, position="learned", table=64))
    model = pretrain.build(learned, learned.config(300))
    assert model.model.positions["learned"].table.num_embeddings == 64
    muon, adamw = pretrain.optimizers(model, learned.optimization)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(parameter)] for parameter in muon.param_groups[0]["params"]}
    assert len(matrices) == 2 * 7
    assert all("proj" in name for name in matrices)
    assert adamw.param_groups[0]["weight_decay"] == 0.0
    untied = replace(recipe, model=replace(recipe.model, tied=False))
    loose = pretrain.build(untied, untied.config(300))
    muon, _ = pretrain.optimizers(loose, untied.optimization)
    assert all(parameter is not loose.lm_head.weight for parameter in muon.param_groups[0]["params"])
    (alone,) = pretrain.optimizers(model, Optimization(optimizer="adamw", weight_decay=0.1))
    assert [group["weight_decay"] for group in alone.param_groups] == [0.1, 0.0]


def test_gradient_accumulation_is_the_gradient_of_the_whole_batch(recipe, prepared):
    config = recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id)
    found = []
    for rows in (1, 2, 4):
        cut = replace(recipe, train=replace(recipe.train, micro_batch=rows))
        work = pretrain.pretraining(cut, pretrain.build(cut, config), prepared)
        assert len(work.batches(0)) == 4 // rows
        loss, norm = Steps(work, clip=0.0).gradients(work.batches(0))
        found.append((loss, norm, *(parameter.grad for parameter in work.trained.values())))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.allclose(one, two, atol=1e-6)
    with pytest.raises(FarspanError, match="no multiple of train.micro_batch=3; choose a divisor of 4"):
        pretrain.shares(replace(recipe.train, micro_batch=3), 1)
    with pytest.raises(FarspanError, match="cannot be shared by 3 processes"):
        pretrain.shares(recipe.train, 3)


def test_clipping_bounds_the_step_and_tells_the_norm_before(recipe, prepared):
    config = recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id)
    work = pretrain.pretraining(recipe, pretrain.build(recipe, config), prepared)
    _, norm = Steps(work, clip=1e-3).gradients(work.batches(0))
    clipped = torch.nn.utils.get_total_norm([parameter.grad for parameter in work.trained.values()])
    assert norm > 0.1
    assert clipped == pytest.approx(1e-3, rel=1e-2)


def test_the_loss_goes_down(straight):
    losses = [line["loss"] for line in straight[1]]
    assert losses[-1] < losses[0] - 0.5


# The text.


def test_text_that_cannot_be_trained_on_is_refused(recipe, tmp_path):
    data = recipe.data

    def preparing(**changes):
        return pretrain.prepared_for(replace(recipe, data=replace(data, cache=str(tmp_path / "cache"), **changes)))

    with pytest.raises(FarspanError, match="has no nothing.txt for data.sources.docs; say where"):
        preparing(sources={"docs": Texts("nothing.txt", 1.0)})
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(FarspanError, match="no text to train a tokenizer on"):
        preparing(folder=str(tmp_path), sources={"docs": Texts("empty.txt", 1.0)})
    with pytest.raises(FarspanError, match="holds no tokenizer.json"):
        preparing(tokenizer=str(tmp_path))
    assert not (tmp_path / "cache").exists()
    shards = preparing().mixture.sources[0].shards
    file = shards.folder / "tokens-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptError, match="is damaged: its SHA-256") as caught:
        preparing()
    assert caught.value.exit_code == 4
    with pytest.raises(FarspanError, match="was packed with the tokenizer"):
        from farspan.data.shards import open_shards
        from farspan.data.tokens import train_tokenizer

        open_shards(shards.folder, train_tokenizer(["other text"], 270))


def test_a_given_tokenizer_is_used(recipe, prepared, tmp_path):
    prepared.tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = replace(recipe.data, tokenizer=str(tmp_path / "tokenizer"))
    again = pretrain.prepared_for(replace(recipe, data=data))
    assert torch.equal(again.mixture.rows(0, 4), prepared.mixture.rows(0, 4))


def test_rows_do_not_depend_on_position_or_steps(recipe, prepared):
    """Twins see the same rows in the same order."""
    other = replace(recipe, model=replace(recipe.model, position="rope"), train=replace(recipe.train, steps=7))
    assert torch.equal(pretrain.prepared_for(other).mixture.rows(100, 8), prepared.mixture.rows(100, 8))


def test_memory_that_runs_out_names_the_way_out(recipe, prepared, tmp_path, monkeypatch):
    def hungry(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pretrain, "train", hungry)
    with pytest.raises(FarspanError, match="out of memory with 2 rows at once; .* train.micro_batch=1"):
        pretrain.pretrain(recipe, tmp_path / "run", prepared=prepared)
