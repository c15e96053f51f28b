"""Flows by name and from a user's file: what is wrong is said, and nothing is left half-registered."""

import sys
import textwrap

import pytest

import flowlib
from flowlib.core import registry
from flowlib.errors import FlowLoadError, OptionError, UnknownFlowError
from tests.processes import python
from tests.refusals import refused

FLOW_FILE = """
import flowlib
from flowlib.ops import Reserved

@flowlib.register("{name}", "{name}_alias")
class Mine(flowlib.vFlow):
    def __init__(self, width: int = 3):
        if width < 1:
            raise ValueError("width must be positive")
        self.width = width

    def forward_indexer(self, q, o, cache, ctx):
        Reserved()(o, ctx=ctx)
"""


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_FLOWS", dict(registry._FLOWS))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "my_flow.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


def known() -> tuple[dict, dict]:
    return dict(registry._FLOWS), dict(registry._ALIASES)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("quest", "gqa_quest_sparse_attention"), ("block_sparse", "gqa_block_sparse_attention"),
     ("streaming", "streaming_attention")],
)  # fmt: skip
def test_aliases(alias, name):
    assert type(flowlib.build(alias)) is type(flowlib.build(name))
    assert alias not in flowlib.list_flows()
    assert alias in registry.aliases_of(name)


def test_flows_are_listed_sorted_and_once():
    names = flowlib.list_flows()
    assert names == sorted(set(names))
    assert {"block_sparse_attention", "quest_sparse_attention"} <= set(names)


@pytest.mark.parametrize("name", flowlib.list_flows())
def test_every_flow_is_documented_and_has_a_page_size(name):
    flow = flowlib.build(name)
    assert (type(flow).__doc__ or "").strip()
    assert 1 <= flow.default_page_size <= 128
    flowlib.profile(flow, flow.default_spec())


def test_an_unknown_flow_names_the_nearest():
    near = "unknown flow 'gqa_quest_sparse_atention'. Did you mean 'gqa_quest_sparse_attention'?"
    with refused(UnknownFlowError, near, "Known: block_sparse_attention, "):
        flowlib.build("gqa_quest_sparse_atention")
    with refused(UnknownFlowError, "unknown flow 'qest'. Did you mean 'quest'?"):
        flowlib.build("qest")


def test_an_unknown_flow_like_no_other_lists_what_there_is():
    with refused(UnknownFlowError, "unknown flow 'zzz'. Known: block_sparse_attention"):
        flowlib.build("zzz")


def test_an_unknown_option_names_the_nearest():
    with refused(OptionError, "flow 'gqa_block_sparse_attention' has no option 'scal' (its options: scale).",
                 "Did you mean 'scale'?"):  # fmt: skip
        flowlib.build("gqa_block_sparse_attention", scal=2.0)
    with refused(OptionError, "flow 'streaming_attention' has no option 'width' (its options: none)."):
        flowlib.build("streaming_attention", width=3)


def test_an_option_the_flow_refuses():
    with refused(OptionError, "Softmax: scale is -2.0, expected a positive number"):
        flowlib.build("gqa_block_sparse_attention", scale=-2.0)


def test_a_user_file(write):
    path = write(FLOW_FILE.format(name="my_flow"))
    flow = flowlib.build("my_flow", module_path=path, width=5)
    assert flow.width == 5
    assert "my_flow" in flowlib.list_flows()
    assert type(flowlib.build("my_flow_alias", module_path=str(path))) is type(flow), "a file is imported once"
    with refused(OptionError, "flow 'my_flow' refused its options {'width': 0}: width must be positive"):
        flowlib.build("my_flow", width=0)


def test_a_file_may_be_edited_and_loaded_again(write):
    first = type(flowlib.build("my_flow", module_path=write(FLOW_FILE.format(name="my_flow"))))
    edited = FLOW_FILE.format(name="my_flow").replace("width: int = 3", "width: int = 4")
    second = flowlib.build("my_flow", module_path=write(edited))
    assert second.width == 4
    assert type(second) is not first


def test_a_file_that_does_not_exist(tmp_path):
    with refused(FlowLoadError, f"flow file '{tmp_path}/none.py' does not exist; module_path takes the path of a .py"):
        flowlib.build("my_flow", module_path=tmp_path / "none.py")


def test_a_file_that_is_no_python_file(write):
    with refused(FlowLoadError, "my_flow.txt' is no Python file"):
        flowlib.build("my_flow", module_path=write(FLOW_FILE.format(name="my_flow"), name="my_flow.txt"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import flowlib\nx = 1 / 0\n", "ZeroDivisionError: division by zero (my_flow.py:2: x = 1 / 0)"),
        ("from flowlib.ops import topKK\n", "ImportError: cannot import name 'topKK'"),
        ("import sys\nsys.exit(1)\n", "SystemExit: 1 (my_flow.py:2: sys.exit(1))"),
        ("class Mine(\n", "SyntaxError: '(' was never closed (my_flow.py:1: class Mine()"),
    ],
    ids=["raises", "imports", "exits", "syntax"],
)
def test_a_file_that_fails_to_import_registers_nothing(write, text, said):
    before, modules = known(), set(sys.modules)
    path = write(FLOW_FILE.format(name="half") + text if "SyntaxError" not in said else text)
    line = said.replace("my_flow.py:2", f"my_flow.py:{len(FLOW_FILE.splitlines()) + 2}")
    with refused(FlowLoadError, f"flow file '{path}' failed to import: ", line):
        flowlib.build("half", module_path=path)
    assert known() == before
    assert not [name for name in set(sys.modules) - modules if "my_flow" in name]


def test_an_interrupted_import_registers_nothing(write):
    before, modules = known(), set(sys.modules)
    path = write(FLOW_FILE.format(name="half") + "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        flowlib.build("half", module_path=path)
    assert known() == before
    assert not [name for name in set(sys.modules) - modules if "my_flow" in name]


def test_a_file_that_takes_a_registered_name(write):
    before = known()
    with refused(FlowLoadError, "failed to import: OptionError: register('quest_sparse_attention'): "
                 "'quest_sparse_attention' is taken by flowlib.algorithms.quest.QuestSparseAttention",
                 "my_flow.py:"):  # fmt: skip
        flowlib.build("quest_sparse_attention", module_path=write(FLOW_FILE.format(name="quest_sparse_attention")))
    assert known() == before


def test_a_name_or_an_alias_belongs_to_one_class():
    flowlib.register("mine", "also_mine")(type("Mine", (flowlib.vFlow,), {}))
    before = known()
    for names in (("mine",), ("also_mine",), ("new", "mine"), ("new", "quest")):
        with refused(OptionError, f"register({names[0]!r}): ", "is taken by ", "choose another name"):
            flowlib.register(*names)(type("Other", (flowlib.vFlow,), {}))
        assert known() == before


def test_only_flows_are_registered():
    with refused(OptionError, "register('mine'): <class 'int'> is not a subclass of vFlow"):
        flowlib.register("mine")(int)


def test_an_alias_can_not_hide_a_flow():
    with refused(OptionError, "is taken by"):
        flowlib.register("streaming")(type("Other", (flowlib.vFlow,), {}))


def test_a_user_script_can_be_run_as_main(write):
    path = write(FLOW_FILE.format(name="my_flow") + "print(flowlib.build('my_flow').width)\n")
    assert python(path) == "3\n"
