"""Recipes survive writing and reading; every invalid recipe is refused in one sentence."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.errors import FarspanError
from farspan.recipe import _leaves, apply_overrides, from_toml, load_recipe, to_toml


@dataclass(frozen=True)
class Source:
    path: str
    weight: float = 1.0
    columns: str | tuple[str, ...] = "text"


@dataclass(frozen=True)
class Data:
    sources: dict[str, Source] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=lambda: {"kind": "prose"})
    mix: dict[str, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Model:
    position: str = "none"
    window: int | None = 128
    scale: float | int = 1
    bases: tuple[float, ...] = ()


@dataclass(frozen=True)
class Train:
    steps: int
    lr: float = 3e-3
    from_: str | None = None
    compile: bool = True
    seed: int = 1
    warmup: int | None = None

    def __post_init__(self):
        if self.steps < 0:
            raise FarspanError(f"train.steps is {self.steps}; write a number of steps from 0 on")


@dataclass(frozen=True)
class Recipe:
    train: Train
    name: str
    note: str | None
    data: Data = Data()
    model: Model = Model(position="rope", window=None)
    tuned: Model | None = None
    teacher: Model | None = Model(window=7)
    tags: tuple[str, ...] = ("a",)


@dataclass(frozen=True)
class OptionalWord:
    word: str | None = "default"


MINIMAL = Recipe(Train(10), "tiny", None)
FILE = 'name = "tiny"\n[train]\nsteps = 10\n'

numbers = st.floats(allow_nan=False, allow_infinity=False)
short_texts = st.text(max_size=8)
texts = short_texts | st.sampled_from(
    ["none", '"', "\\", "\r\n", "\x7f\x00\x1b", "\u2028\x85", "'''\"\"\"", "#", "λ̂ 🦒"]
)
names = st.sampled_from(["books", "a.b", "", "*", "two words", "ü", '"', "-1"]) | short_texts
integers = st.integers(-(2**70), 2**70)
sources = st.builds(Source, texts, numbers, texts | st.lists(texts, max_size=3).map(tuple))
models = st.builds(
    Model,
    texts,
    st.none() | integers,
    integers | numbers,
    st.lists(numbers, max_size=30).map(tuple),
)
recipes = st.builds(
    Recipe,
    train=st.builds(
        Train,
        st.integers(0),
        numbers,
        st.none() | texts,
        st.booleans(),
        integers,
        st.none() | integers,
    ),
    name=texts,
    note=st.none() | texts,
    data=st.builds(
        Data,
        st.dictionaries(names, sources, max_size=3),
        st.dictionaries(names, texts, max_size=3),
        st.dictionaries(names, numbers, max_size=3),
        integers,
    ),
    model=models,
    tuned=st.none() | models,
    teacher=st.none() | models,
    tags=st.lists(texts, max_size=3).map(tuple),
)


@pytest.fixture
def recipe_dir(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "tiny.toml").write_text(FILE)
    return folder


def read(text: str, *overrides: str, recipe_dir) -> Recipe:
    path = recipe_dir.parent / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(Recipe, path, overrides, recipe_dir=recipe_dir)


def refusal(call) -> str:
    """The message of a FarspanError: one line, with the way out after a semicolon."""
    with pytest.raises(FarspanError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    assert not message.endswith(".")
    return message


@settings(deadline=None)
@given(recipes)
def test_a_written_recipe_is_read_back_equal(recipe):
    text = to_toml(recipe)
    again = from_toml(Recipe, text)
    assert again == recipe
    assert to_toml(again) == text
    assert type(again.model.scale) is type(recipe.model.scale)


fragments = st.text('train.stepslrdaoucwgh[]{}="1\n -e,', max_size=40)


@settings(deadline=None)
@given(st.text() | fragments)
def test_any_text_is_a_recipe_or_refused(text):
    with suppress(FarspanError):
        from_toml(Recipe, text)


KNOWN_KEYS = [".".join(keys) for keys in _leaves(Recipe)]


@settings(deadline=None)
@given(fragments | st.tuples(st.sampled_from(KNOWN_KEYS), st.text()).map("=".join))
def test_any_override_is_applied_or_refused(tmp_path_factory, text):
    with suppress(FarspanError):
        load_recipe(Recipe, recipe_file(tmp_path_factory), [text], recipe_dir=Path())


@settings(deadline=None)
@given(texts)
def test_a_written_line_is_an_override(tmp_path_factory, name):
    line = to_toml(replace(MINIMAL, name=name)).split("\n")[0]
    assert (
        load_recipe(Recipe, recipe_file(tmp_path_factory), [line], recipe_dir=Path()).name == name
    )


def recipe_file(factory) -> Path:
    path = factory.getbasetemp() / "minimal.toml"
    path.write_text(FILE)
    return path


def test_the_written_format():
    recipe = replace(
        MINIMAL,
        data=Data({"books": Source("b.txt"), "my web": Source("w\n", 1e-5, ("a", "b"))}, {}),
        model=Model("none", None, 1e22, tuple(map(float, range(1000, 1020)))),
        teacher=None,
    )
    listed = "".join(f"    {base}.0,\n" for base in range(1000, 1020))
    assert to_toml(recipe) == (
        'name = "tiny"\nteacher = ""\ntags = ["a"]\n\n'
        "[train]\nsteps = 10\nlr = 0.003\ncompile = true\nseed = 1\n\n"
        "[data]\nseed = 0\n\n"
        '[data.sources.books]\npath = "b.txt"\nweight = 1.0\ncolumns = "text"\n\n'
        '[data.sources."my web"]\npath = "w\\n"\nweight = 1e-5\ncolumns = ["a", "b"]\n\n'
        "[data.labels]\n\n"
        "[data.mix]\n\n"
        f'[model]\nposition = "none"\nscale = 1e22\nbases = [\n{listed}]\n'
    )


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_refuses_numbers_that_are_not_finite(number):
    assert "train.lr" in refusal(lambda: to_toml(replace(MINIMAL, train=Train(1, lr=number))))
    assert "model.bases" in refusal(
        lambda: to_toml(replace(MINIMAL, model=Model(bases=(1.0, number))))
    )
    assert "finite" in refusal(lambda: from_toml(Recipe, FILE + f"lr = {number}"))


def test_refuses_to_write_values_that_toml_cannot_hold():
    assert "UTF-8" in refusal(lambda: to_toml(replace(MINIMAL, name="\udcff")))
    assert "word is None" in refusal(lambda: to_toml(OptionalWord(None)))
    assert from_toml(OptionalWord, to_toml(OptionalWord(""))) == OptionalWord("")
    with pytest.raises(TypeError, match="word = "):
        to_toml(OptionalWord(b"bytes"))


def test_known_keys():
    assert KNOWN_KEYS[:7] == [
        "train.steps",
        "train.lr",
        "train.from",
        "train.compile",
        "train.seed",
        "train.warmup",
        "name",
    ]
    assert {"data.sources.*.weight", "data.labels.*", "tuned.window", "tags"} <= set(KNOWN_KEYS)


def test_a_recipe_is_read_by_name_and_by_path(recipe_dir):
    assert load_recipe(Recipe, "tiny", recipe_dir=recipe_dir) == MINIMAL
    assert load_recipe(Recipe, recipe_dir / "tiny.toml", recipe_dir=recipe_dir) == MINIMAL
    assert (
        load_recipe(Recipe, str(recipe_dir / "tiny.toml"), recipe_dir=recipe_dir / "nowhere")
        == MINIMAL
    )
    assert read("\ufeff" + FILE, recipe_dir=recipe_dir) == MINIMAL
    assert "did you mean tiny" in refusal(
        lambda: load_recipe(Recipe, "tinny", recipe_dir=recipe_dir)
    )
    assert "choose one of tiny" in refusal(
        lambda: load_recipe(Recipe, "large", recipe_dir=recipe_dir)
    )
    assert "is empty" in refusal(
        lambda: load_recipe(Recipe, "large", recipe_dir=recipe_dir / "nowhere")
    )
    assert "does not exist" in refusal(
        lambda: load_recipe(Recipe, "large.toml", recipe_dir=recipe_dir)
    )


def test_a_recipe_is_merged_over_its_base_table_by_table(recipe_dir):
    (recipe_dir / "base.toml").write_text(
        'base = "tiny"\ntags = ["x", "y"]\n[train]\nlr = 1\nwarmup = 5\n'
        '[data.sources.web]\npath = "w"\n[data.sources.books]\npath = "b"\nweight = 2\n'
    )
    recipe = read(
        'base = "recipes/base.toml"\ntags = ["z"]\n[train]\nwarmup = ""\n'
        '[data.sources.books]\nweight = 3\n[data.sources.code]\npath = "c"\n',
        recipe_dir=recipe_dir,
    )
    expected = {"web": Source("w"), "books": Source("b", 3.0), "code": Source("c")}
    assert recipe == replace(MINIMAL, train=Train(10, 1.0), data=Data(expected), tags=("z",))
    assert list(recipe.data.sources) == ["web", "books", "code"]


def test_refuses_bases_that_are_missing_cyclic_or_invalid(recipe_dir):
    (recipe_dir / "one.toml").write_text('base = "two"')
    (recipe_dir / "two.toml").write_text('base = "../recipes/one.toml"')
    (recipe_dir / "self.toml").write_text('base = "self"')
    cycle = refusal(lambda: load_recipe(Recipe, "one", recipe_dir=recipe_dir))
    assert "one.toml -> " in cycle
    assert "two.toml -> " in cycle
    assert "self.toml -> " in refusal(lambda: load_recipe(Recipe, "self", recipe_dir=recipe_dir))
    assert "the base of" in refusal(lambda: read('base = "tinny"', recipe_dir=recipe_dir))
    assert "does not exist" in refusal(lambda: read('base = "tiny.toml"', recipe_dir=recipe_dir))
    assert "base = 5" in refusal(lambda: read("base = 5", recipe_dir=recipe_dir))
    assert "cannot be read" in refusal(lambda: read('base = "\\u0000.toml"', recipe_dir=recipe_dir))
    assert "no key base" in refusal(
        lambda: from_toml(Recipe, FILE.replace("name", 'base = "tiny"\nname'))
    )


def test_refuses_unreadable_files(recipe_dir):
    (recipe_dir / "latin.toml").write_bytes(b'name = "\xfc"')
    (recipe_dir / "folder.toml").mkdir()
    (recipe_dir / "broken.toml").write_text("name =\n")
    assert "not UTF-8 text (byte 8)" in refusal(
        lambda: load_recipe(Recipe, "latin", recipe_dir=recipe_dir)
    )
    assert "IsADirectoryError" in refusal(
        lambda: load_recipe(Recipe, "folder", recipe_dir=recipe_dir)
    )
    message = refusal(lambda: load_recipe(Recipe, "broken", recipe_dir=recipe_dir))
    assert "broken.toml is not valid TOML" in message
    assert "line 1, column 7" in message
    assert "too deeply" in refusal(lambda: from_toml(Recipe, "name = " + "[" * 5000))
    assert "digits" in refusal(lambda: from_toml(Recipe, "name = " + "1" * 5000))


@pytest.mark.parametrize(
    ("text", "key", "closest"),
    [
        ("stpes = 1", "train.stpes", "train.steps"),
        ("windw = 1", "train.windw", "tuned.window"),
        ("weight = 1", "train.weight", "data.sources.*.weight"),
        ("steps.deep = 1", "train.steps.deep", "train.steps"),
        ("[trian]", "trian", "train"),
        ("from_ = 1", "train.from_", "train.from"),
        (
            "[data.sources.books]\nwieght = 1",
            "data.sources.books.wieght",
            "data.sources.books.weight",
        ),
        ('[data.sources."a.b"]\npaht = 1', 'data.sources."a.b".paht', "data.sources.a.b.path"),
        ("[data]\nsource = 1", "data.source", "data.sources"),
        ("[data]\nweight = 1", "data.weight", "data.sources.*.weight"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_known_key(text, key, closest):
    text = FILE.replace("steps = 10\n", "") + text
    assert (
        refusal(lambda: from_toml(Recipe, text))
        == f"a recipe has no key {key}; did you mean {closest}?"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=abc", 'train.steps = "abc" is invalid; write an integer'),
        ("train.steps=1.0", "train.steps = 1.0 is invalid; write an integer"),
        ("train.steps=true", "train.steps = true is invalid; write an integer"),
        ("train.steps=", 'train.steps = "" is invalid; write an integer'),
        ("train.steps={}", "train.steps = {…} is invalid; write an integer"),
        ("train.lr=true", "train.lr = true is invalid; write a finite number"),
        ("train.lr=nan", "train.lr = NaN is invalid; write a finite number"),
        ("train.compile=1", "train.compile = 1 is invalid; write true or false"),
        ("train.warmup=x", 'train.warmup = "x" is invalid; write an integer, or "" for none'),
        ("name=['a']", 'name = ["a"] is invalid; write a string'),
        ("tags=a", 'tags = "a" is invalid; write a list of strings'),
        ("tags=[1]", "tags = [1] is invalid; write a list of strings"),
        (
            "model.bases=[1, true]",
            "model.bases = [1, true] is invalid; write a list of finite numbers",
        ),
        ("model=5", "model = 5 is invalid; write a table, or set model.position"),
        ("data.labels=a", 'data.labels = "a" is invalid; write a table, or set data.labels.*'),
        (
            "data.sources.a=1",
            "data.sources.a = 1 is invalid; write a table, or set data.sources.a.path",
        ),
        ("tuned=5", 'tuned = 5 is invalid; write a table, or "" for none, or set tuned.position'),
        ("data.mix.web=a", 'data.mix.web = "a" is invalid; write a finite number'),
        ("data.sources.a={path=1}", "data.sources.a.path = 1 is invalid; write a string"),
        (
            "data.sources.a={path='p', columns=[1]}",
            "data.sources.a.columns = [1] is invalid; write a string or a list of strings",
        ),
        ("data.sources.a.weight=1", "data.sources.a.path is missing; set it to a string"),
        (
            "data.sources.a.wait=1",
            "a recipe has no key data.sources.a.wait; did you mean data.sources.a.weight?",
        ),
        ("stpes=1", "a recipe has no key stpes; did you mean train.steps?"),
        (
            "train.zzz=1",
            "a recipe has no key train.zzz; choose one of train, name, note, data, model, tuned, "
            "teacher, tags",
        ),
        ("steps=-1", "train.steps is -1; write a number of steps from 0 on"),
        ("seed=1", "the key seed could be train.seed or data.seed; write it in full"),
        ("weight=1", "the key weight could be data.sources.*.weight; write it in full"),
        ("steps", "the override 'steps' is invalid; write it as key=value"),
        ("=1", "the override '=1' is invalid; write it as key=value"),
    ],
)
def test_refuses_invalid_overrides(override, message, recipe_dir):
    assert (
        refusal(lambda: load_recipe(Recipe, "tiny", [override], recipe_dir=recipe_dir)) == message
    )


def test_a_missing_key_is_named():
    assert refusal(lambda: from_toml(Recipe, 'name = "x"')) == "train is missing; set it to a table"
    assert (
        refusal(lambda: from_toml(Recipe, "[train]"))
        == "train.steps is missing; set it to an integer"
    )


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=100", "train.steps", 100),
        ("steps = 100", "train.steps", 100),
        ("train.steps=1_000", "train.steps", 1000),
        ("lr=1", "train.lr", 1.0),
        ("lr=1e-5", "train.lr", 1e-5),
        ("compile=false", "train.compile", False),
        ("train.from=none", "train.from_", "none"),
        ('from="none"', "train.from_", "none"),
        ("train.from=", "train.from_", None),
        ("teacher=", "teacher", None),
        ('train.from=""', "train.from_", ""),
        ("name=", "name", ""),
        ("name=2024-01-01", "name", "2024-01-01"),
        ("name=007", "name", "007"),
        ("name=1", "name", "1"),
        ("name=a=b # c", "name", "a=b # c"),
        ("name=[draft]", "name", "[draft]"),
        ("teacher.window=", "teacher.window", None),
        ('teacher.window=""', "teacher.window", None),
        ("model.scale=2", "model.scale", 2),
        ("model.scale=2.0", "model.scale", 2.0),
        ("model.bases=[1, 2.5]", "model.bases", (1.0, 2.5)),
        ('tags=["x", "y"]', "tags", ("x", "y")),
        ("tags=[]", "tags", ()),
        ("data.labels.tone=dry", "data.labels", {"tone": "dry"}),
        ("data.mix={a = 1, b = 2}", "data.mix", {"a": 1.0, "b": 2.0}),
        ("data.sources.books.path=b", "data.sources", {"books": Source("b")}),
        ('data.sources."a.b".path=b', "data.sources", {"a.b": Source("b")}),
        ("data.sources.bücher.path=b", "data.sources", {"bücher": Source("b")}),
        (
            'data.sources.a={path="p", columns=["q"]}',
            "data.sources",
            {"a": Source("p", columns=("q",))},
        ),
    ],
)
def test_overrides_in_every_form(override, key, value, recipe_dir):
    recipe = load_recipe(Recipe, "tiny", [override], recipe_dir=recipe_dir)
    parsed = attrgetter(key)(recipe)
    assert parsed == value
    assert type(parsed) is type(value)
    assert from_toml(Recipe, to_toml(recipe)) == recipe


def test_overrides_change_nested_values_and_the_last_one_wins(recipe_dir):
    text = FILE + '[data.sources.books]\npath = "b"\n[data.sources.web]\npath = "w"\n'
    recipe = read(
        text,
        "data.sources.books.weight=0.5",
        "data.sources.books.weight=0.25",
        recipe_dir=recipe_dir,
    )
    assert recipe.data.sources == {"books": Source("b", 0.25), "web": Source("w")}


def test_an_override_replaces_a_whole_dict_and_adds_to_a_config(recipe_dir):
    text = FILE + '[data.sources.books]\npath = "b"\n[model]\nbases = [1.0]\n'
    sources = 'data.sources={web = {path = "w"}}'
    recipe = read(text, sources, "model={scale = 2}", recipe_dir=recipe_dir)
    assert recipe.data.sources == {"web": Source("w")}
    assert (recipe.model.scale, recipe.model.bases) == (2, (1.0,))
    nested = read(text, 'data={sources = {web = {path = "w"}}}', recipe_dir=recipe_dir)
    assert set(nested.data.sources) == {"books", "web"}, "to a config, a table adds"


def test_a_partial_table_keeps_the_rest_of_its_default():
    recipe = from_toml(Recipe, FILE + "[model]\nscale = 2\n[tuned]\n")
    assert recipe.model == Model("rope", None, 2)
    assert recipe.tuned == Model()


def test_a_written_recipe_is_plain_toml():
    assert tomllib.loads(to_toml(MINIMAL))["model"] == {"position": "rope", "scale": 1, "bases": []}


@dataclass(frozen=True)
class Budgets:
    steps: dict[str, int] = field(default_factory=dict)
    train: Train = Train(10)
    model: Model = Model()
    report_windows: int = 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "a recipe has no key stepz; did you mean train.steps?"),  # a value, no table
        ("steps=3", "steps = 3 is invalid; write a table, or set train.steps or steps.*"),
        ("windows=3", "a recipe has no key windows; did you mean report_windows?"),
        ("x=1", "a recipe has no key x; choose one of steps, train, model, report_windows"),
    ],
)
def test_suggests_values_by_their_last_name(override, message):
    assert refusal(lambda: apply_overrides(Budgets(), [override])) == message
