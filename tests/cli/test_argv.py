"""The words of a command line, before any experiment is loaded."""

from __future__ import annotations

import pytest

from nitro_cli.cli.argv import command_of, experiment_word, parse
from nitro_cli.cli.options import COMMANDS, Option
from nitro_cli.errors import UsageError

TRAIN = COMMANDS["train"].options
FIELDS = [
    Option("--learning-rate", "learning_rate", "text", "", metavar="float", field="learning_rate"),
    Option("--max-epochs", "max_epochs", "text", "", metavar="int", field="max_epochs"),
    Option("--batch-size", "batch_size", "text", "", metavar="int", field="batch_size"),
    Option("--hidden", "hidden", "text", "", metavar="list[int]", field="hidden"),
    Option("--run-tag", "run_tag", "text", "", metavar="str", field="run_tag"),
    Option("--use-bn", "use_bn", "bool", "", metavar="bool", negative="--no-use-bn", field="use_bn"),
]


def read(*tokens: str):
    return parse(tokens, (*FIELDS, *TRAIN), keep="myexp")


def said(*tokens: str) -> str:
    return "\n".join(problem.render() for problem in read(*tokens).problems)


def known(*names: str):
    return lambda word: word in names


@pytest.mark.parametrize(
    ("tokens", "values"),
    [
        (["--learning-rate", "-1e-3"], {"learning_rate": "-1e-3"}),
        (["--learning-rate=-1e-3"], {"learning_rate": "-1e-3"}),
        (["--learning-rate", "-.5"], {"learning_rate": "-.5"}),
        (["--learning-rate", "-inf"], {"learning_rate": "-inf"}),
        (["--hidden", "-1,-2"], {"hidden": "-1,-2"}),
        (["--max_epochs", "3"], {"max_epochs": "3"}),
        (["--max-epochs", "3"], {"max_epochs": "3"}),
        (["--run-tag", "a=b=c"], {"run_tag": "a=b=c"}),
        (["--run-tag=a=b=c"], {"run_tag": "a=b=c"}),
        (["--run-tag=-x"], {"run_tag": "-x"}),
        (["--run-tag="], {"run_tag": ""}),
        (["--use-bn"], {"use_bn": "true"}),
        (["--no-use-bn"], {"use_bn": "false"}),
        (["--no_use_bn"], {"use_bn": "false"}),
        (["--use-bn=false"], {"use_bn": "false"}),
        (["--use-bn=true"], {"use_bn": "true"}),
        (["-qq", "-v"], {"quiet": 2, "verbose": 1}),
        (["--resume"], {"resume": "latest"}),
        (["--resume=20261130"], {"resume": "20261130"}),
    ],
)
def test_what_words_mean(tokens, values):
    parsed = read(*tokens, "myexp")
    assert parsed.values == values
    assert parsed.words == ["myexp"]
    assert parsed.problems == []


@pytest.mark.parametrize("word", ["false", "true", "0", "no"])
def test_a_word_after_a_yes_or_no_option_is_refused_and_the_forms_are_named(word):
    parsed = read("--use-bn", word, "myexp")
    assert parsed.words == ["myexp"]
    assert "use_bn" not in parsed.values
    (problem,) = parsed.problems
    for form in ("--use-bn", "--no-use-bn", "--use-bn=false"):
        assert form in problem.notes[0]


@pytest.mark.parametrize(
    "tokens",
    [
        ["--learning-rate", "1", "--learning-rate", "2"],
        ["--use-bn", "--no-use-bn"],
        ["--preset", "a", "--preset=a"],
        ["--json", "--json"],
    ],
)
def test_given_twice_is_an_error(tokens):
    assert "given twice" in said(*tokens)


@pytest.mark.parametrize(
    ("tokens", "nearest"),
    [
        (["--learningrate", "0.1"], "--learning-rate"),
        (["--max-epoch", "5"], "--max-epochs"),
        (["--batch", "8"], "--batch-size"),
        (["--lr", "8"], "--learning-rate"),
        (["--resum=auto"], "--resume"),
        (["--optimizer.lr", "1"], "--learning-rate"),
        (["--optimizer.lr=1"], "--learning-rate"),
    ],
)
def test_an_unknown_option_is_an_error_with_the_nearest_one(tokens, nearest):
    parsed = read(*tokens, "myexp")
    assert parsed.words == ["myexp"]
    (problem,) = parsed.problems
    assert problem.what == f"no such option {tokens[0].partition('=')[0]}"
    assert problem.facts["suggestions"][0] == nearest
    assert f"did you mean {nearest}?" in problem.label


def test_words_that_cannot_be_read(snapshot):
    assert said("--bogus", "myexp", "--optimizer.lr", "1", "--max-epochs", "--use-bn=", "--json=1", "-e") == snapshot


def test_a_value_that_begins_with_a_dash_is_shown_how_to_write(snapshot):
    assert said("--run-tag", "-x") == snapshot


@pytest.mark.parametrize(
    "tokens",
    [
        ["myexp", "--hidden", "8,8"],
        ["--hidden", "8,8", "myexp", "--preset", "current"],
        ["--preset", "other", "myexp"],
        ["--use-bn", "myexp"],
        ["--run-tag", "myexp", "--json", "myexp"],
        ["-v", "myexp"],
        ["--resume", "myexp"],
        ["--learning-rate", "-1", "myexp"],
    ],
)
def test_the_experiment_is_found_wherever_it_stands(tokens):
    assert experiment_word(tokens, TRAIN, known("myexp", "other")) == "myexp"


def test_the_value_of_an_unknown_option_is_no_experiment():
    assert experiment_word(["--bogus"], TRAIN, known("myexp")) is None
    assert experiment_word(["--bogus", "5"], TRAIN, known("myexp")) is None
    assert experiment_word(["nosuch"], TRAIN, known("myexp")) == "nosuch"


@pytest.mark.parametrize(
    "argv",
    [
        ["--preset", "current", "train", "myexp"],
        ["--json", "train", "myexp"],
        ["--max-epochs", "3"],
        ["trian", "myexp"],
        ["myexp", "--preset", "current"],
        ["nonsense"],
    ],
)
def test_a_command_line_in_the_wrong_order(argv, snapshot):
    with pytest.raises(UsageError) as error:
        command_of(argv, known("myexp"))
    assert str(error.value) == snapshot
