"""A recipe that was read can be written and read again; what is wrong with one is said in a sentence."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.errors import FarspanError
from farspan.recipe import _leaves, from_toml, load_recipe, to_toml


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
class Odd:
    word: str | None = "said"


LEAST = Recipe(Train(10), "tiny", None)
FILE = 'name = "tiny"\n[train]\nsteps = 10\n'

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=8)
texts = words | st.sampled_from(["none", '"', "\\", "\r\n", "\x7f\x00\x1b", "\u2028\x85", "'''\"\"\"", "#", "λ̂ 🦒"])
names = st.sampled_from(["books", "a.b", "", "*", "two words", "ü", '"', "-1"]) | words
integers = st.integers(-(2**70), 2**70)
sources = st.builds(Source, texts, numbers, texts | st.lists(texts, max_size=3).map(tuple))
models = st.builds(Model, texts, st.none() | integers, integers | numbers, st.lists(numbers, max_size=30).map(tuple))
recipes = st.builds(
    Recipe,
    train=st.builds(Train, st.integers(0), numbers, st.none() | texts, st.booleans(), integers, st.none() | integers),
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
def shelf(tmp_path):
    folder = tmp_path / "shelf"
    folder.mkdir()
    (folder / "tiny.toml").write_text(FILE)
    return folder


def read(text: str, *overrides: str, shelf) -> Recipe:
    path = shelf.parent / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(Recipe, path, overrides, shelf=shelf)


def refusal(call) -> str:
    """The message of a FarspanError, which is one line and says the way out after a semicolon."""
    with pytest.raises(FarspanError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    assert not message.endswith(".")
    return message


@given(recipes)
def test_what_was_written_is_read_back_equal(recipe):
    text = to_toml(recipe)
    again = from_toml(Recipe, text)
    assert again == recipe
    assert to_toml(again) == text
    assert type(again.model.scale) is type(recipe.model.scale)


fragments = st.text('train.stepslrdaoucwgh[]{}="1\n -e,', max_size=40)


@given(st.text() | fragments)
def test_any_text_is_a_recipe_or_refused(text):
    with suppress(FarspanError):
        from_toml(Recipe, text)


KNOWN = [".".join(keys) for keys in _leaves(Recipe)]


@given(fragments | st.tuples(st.sampled_from(KNOWN), st.text()).map("=".join))
def test_any_override_is_taken_or_refused(tmp_path_factory, text):
    with suppress(FarspanError):
        load_recipe(Recipe, law_file(tmp_path_factory), [text], shelf=Path())


@given(texts)
def test_a_written_line_is_an_override(tmp_path_factory, name):
    line = to_toml(replace(LEAST, name=name)).split("\n")[0]
    assert load_recipe(Recipe, law_file(tmp_path_factory), [line], shelf=Path()).name == name


def law_file(factory) -> Path:
    path = factory.getbasetemp() / "law.toml"
    path.write_text(FILE)
    return path


def test_it_is_written_beautifully():
    recipe = replace(
        LEAST,
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
def test_no_number_that_is_not_finite(number):
    assert "train.lr" in refusal(lambda: to_toml(replace(LEAST, train=Train(1, lr=number))))
    assert "model.bases" in refusal(lambda: to_toml(replace(LEAST, model=Model(bases=(1.0, number)))))
    assert "finite" in refusal(lambda: from_toml(Recipe, FILE + f"lr = {number}"))


def test_what_toml_cannot_hold_is_not_written():
    assert "UTF-8" in refusal(lambda: to_toml(replace(LEAST, name="\udcff")))
    assert "word is None" in refusal(lambda: to_toml(Odd(None)))
    assert from_toml(Odd, to_toml(Odd(""))) == Odd("")
    with pytest.raises(TypeError, match="word = "):
        to_toml(Odd(b"bytes"))


def test_the_known_keys():
    assert KNOWN[:7] == ["train.steps", "train.lr", "train.from", "train.compile", "train.seed", "train.warmup", "name"]
    assert {"data.sources.*.weight", "data.labels.*", "tuned.window", "tags"} <= set(KNOWN)


def test_a_recipe_comes_by_name_and_by_path(shelf):
    assert load_recipe(Recipe, "tiny", shelf=shelf) == LEAST
    assert load_recipe(Recipe, shelf / "tiny.toml", shelf=shelf) == LEAST
    assert load_recipe(Recipe, str(shelf / "tiny.toml"), shelf=shelf / "nowhere") == LEAST
    assert read("\ufeff" + FILE, shelf=shelf) == LEAST
    assert "the nearest is tiny" in refusal(lambda: load_recipe(Recipe, "tinny", shelf=shelf))
    assert "there are tiny" in refusal(lambda: load_recipe(Recipe, "large", shelf=shelf))
    assert "is empty" in refusal(lambda: load_recipe(Recipe, "large", shelf=shelf / "nowhere"))
    assert "does not exist" in refusal(lambda: load_recipe(Recipe, "large.toml", shelf=shelf))


def test_a_recipe_lies_over_its_base_table_by_table(shelf):
    (shelf / "below.toml").write_text(
        'base = "tiny"\ntags = ["x", "y"]\n[train]\nlr = 1\nwarmup = 5\n'
        '[data.sources.web]\npath = "w"\n[data.sources.books]\npath = "b"\nweight = 2\n'
    )
    recipe = read(
        'base = "shelf/below.toml"\ntags = ["z"]\n[train]\nwarmup = ""\n'
        '[data.sources.books]\nweight = 3\n[data.sources.code]\npath = "c"\n',
        shelf=shelf,
    )
    expected = {"web": Source("w"), "books": Source("b", 3.0), "code": Source("c")}
    assert recipe == replace(LEAST, train=Train(10, 1.0), data=Data(expected), tags=("z",))
    assert list(recipe.data.sources) == ["web", "books", "code"]


def test_bases_that_cannot_be_followed(shelf):
    (shelf / "one.toml").write_text('base = "two"')
    (shelf / "two.toml").write_text('base = "../shelf/one.toml"')
    (shelf / "self.toml").write_text('base = "self"')
    circle = refusal(lambda: load_recipe(Recipe, "one", shelf=shelf))
    assert "one.toml -> " in circle
    assert "two.toml -> " in circle
    assert "self.toml -> " in refusal(lambda: load_recipe(Recipe, "self", shelf=shelf))
    assert "the base of" in refusal(lambda: read('base = "tinny"', shelf=shelf))
    assert "does not exist" in refusal(lambda: read('base = "tiny.toml"', shelf=shelf))
    assert "base = 5" in refusal(lambda: read("base = 5", shelf=shelf))
    assert "cannot be read" in refusal(lambda: read('base = "\\u0000.toml"', shelf=shelf))
    assert "no key base" in refusal(lambda: from_toml(Recipe, FILE.replace("name", 'base = "tiny"\nname')))


def test_files_that_cannot_be_read(shelf):
    (shelf / "latin.toml").write_bytes(b'name = "\xfc"')
    (shelf / "folder.toml").mkdir()
    (shelf / "broken.toml").write_text("name =\n")
    assert "not UTF-8 text (byte 8)" in refusal(lambda: load_recipe(Recipe, "latin", shelf=shelf))
    assert "IsADirectoryError" in refusal(lambda: load_recipe(Recipe, "folder", shelf=shelf))
    message = refusal(lambda: load_recipe(Recipe, "broken", shelf=shelf))
    assert "broken.toml is not valid TOML" in message
    assert "line 1, column 7" in message
    assert "too deeply" in refusal(lambda: from_toml(Recipe, "name = " + "[" * 5000))
    assert "digits" in refusal(lambda: from_toml(Recipe, "name = " + "1" * 5000))


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("stpes = 1", "train.stpes", "train.steps"),
        ("windw = 1", "train.windw", "tuned.window"),
        ("weight = 1", "train.weight", "data.sources.*.weight"),
        ("steps.deep = 1", "train.steps.deep", "train.steps"),
        ("[trian]", "trian", "train"),
        ("from_ = 1", "train.from_", "train.from"),
        ("[data.sources.books]\nwieght = 1", "data.sources.books.wieght", "data.sources.books.weight"),
        ('[data.sources."a.b"]\npaht = 1', 'data.sources."a.b".paht', "data.sources.a.b.path"),
        ("[data]\nsource = 1", "data.source", "data.sources"),
        ("[data]\nweight = 1", "data.weight", "data.sources.*.weight"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(text, key, nearest):
    text = FILE.replace("steps = 10\n", "") + text
    assert refusal(lambda: from_toml(Recipe, text)) == f"a recipe has no key {key}; the nearest is {nearest}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=abc", 'train.steps = "abc" does not fit; write an integer'),
        ("train.steps=1.0", "train.steps = 1.0 does not fit; write an integer"),
        ("train.steps=true", "train.steps = true does not fit; write an integer"),
        ("train.steps=", 'train.steps = "" does not fit; write an integer'),
        ("train.steps={}", "train.steps = {…} does not fit; write an integer"),
        ("train.lr=true", "train.lr = true does not fit; write a finite number"),
        ("train.lr=nan", "train.lr = NaN does not fit; write a finite number"),
        ("train.compile=1", "train.compile = 1 does not fit; write true or false"),
        ("train.warmup=x", 'train.warmup = "x" does not fit; write an integer, or "" for none'),
        ("name=['a']", 'name = ["a"] does not fit; write a string'),
        ("tags=a", 'tags = "a" does not fit; write a list of strings'),
        ("tags=[1]", "tags = [1] does not fit; write a list of strings"),
        ("model.bases=[1, true]", "model.bases = [1, true] does not fit; write a list of finite numbers"),
        ("model=5", "model = 5 does not fit; write a table"),
        ("data.labels=a", 'data.labels = "a" does not fit; write a table'),
        ("data.mix.web=a", 'data.mix.web = "a" does not fit; write a finite number'),
        ("data.sources.a={path=1}", "data.sources.a.path = 1 does not fit; write a string"),
        (
            "data.sources.a={path='p', columns=[1]}",
            "data.sources.a.columns = [1] does not fit; write a string or a list of strings",
        ),
        ("data.sources.a.weight=1", "data.sources.a.path is missing; write a string for it"),
        ("data.sources.a.wait=1", "a recipe has no key data.sources.a.wait; the nearest is data.sources.a.weight"),
        ("stpes=1", "a recipe has no key stpes; the nearest is train.steps"),
        ("steps=-1", "train.steps is -1; write a number of steps from 0 on"),
        ("seed=1", "the key seed could be train.seed or data.seed; write it in full"),
        ("weight=1", "the key weight could be data.sources.*.weight; write it in full"),
        ("steps", "the override 'steps' is no key and value; write it as key=value"),
        ("=1", "the override '=1' is no key and value; write it as key=value"),
    ],
)
def test_an_override_that_does_not_fit(override, message, shelf):
    assert refusal(lambda: load_recipe(Recipe, "tiny", [override], shelf=shelf)) == message


def test_a_missing_key_is_named():
    assert refusal(lambda: from_toml(Recipe, 'name = "x"')) == "train is missing; write a table for it"
    assert refusal(lambda: from_toml(Recipe, "[train]")) == "train.steps is missing; write an integer for it"


@pytest.mark.parametrize(
    ("override", "place", "value"),
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
        ('data.sources.a={path="p", columns=["q"]}', "data.sources", {"a": Source("p", columns=("q",))}),
    ],
)
def test_an_override_in_each_form(override, place, value, shelf):
    recipe = load_recipe(Recipe, "tiny", [override], shelf=shelf)
    found = attrgetter(place)(recipe)
    assert found == value
    assert type(found) is type(value)
    assert from_toml(Recipe, to_toml(recipe)) == recipe


def test_overrides_reach_into_what_stands_and_the_last_one_wins(shelf):
    text = FILE + '[data.sources.books]\npath = "b"\n[data.sources.web]\npath = "w"\n'
    recipe = read(text, "data.sources.books.weight=0.5", "data.sources.books.weight=0.25", shelf=shelf)
    assert recipe.data.sources == {"books": Source("b", 0.25), "web": Source("w")}


def test_a_table_that_says_a_part_keeps_the_rest_of_its_default():
    recipe = from_toml(Recipe, FILE + "[model]\nscale = 2\n[tuned]\n")
    assert recipe.model == Model("rope", None, 2)
    assert recipe.tuned == Model()


def test_a_file_of_ours_is_plain_toml():
    assert tomllib.loads(to_toml(LEAST))["model"] == {"position": "rope", "scale": 1, "bases": []}
