"""Search spaces: each kind of domain through Optuna, conditional parameters, and errors that name the mend."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import yaml

from dmlstudy.spec import space as spaces
from dmlstudy.spec.space import Choice, Fixed, Float, Int, defaults, names, parse_domain, parse_space
from dmlstudy.spec.space import replace as replaced

optuna.logging.set_verbosity(optuna.logging.WARNING)

NESTED = yaml.safe_load("""
weighting:
  choice:
    constant: {}
    power: {p: {float: [0, 2]}, q: {float: [0, 5], default: 1}}
    exponential:
      beta: {float: [0.5, 50], log: true, default: 2}
      mode: {choice: {soft: {heat: {int: [1, 9], step: 4, default: 5}}, hard: {}}, default: hard}
  default: exponential
classes: {int: [8, 64], log: true, default: 16}
margin: 0.5
note: null
""")


def drawn(value: Any, num: int = 60) -> tuple[list[dict[str, Any]], optuna.Study]:
    """Samples of the space, and the study they were drawn in."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    samples = []
    for _ in range(num):
        trial = study.ask()
        samples.append(spaces.sample(parse_space(value, "loss"), trial, "f/loss"))
        study.tell(trial, 0.0)
    return samples, study


def test_a_float_stays_within_its_bounds() -> None:
    samples, study = drawn({"m": {"float": [0.5, 2], "default": 0.8}})
    assert all(0.5 <= s["m"] <= 2 and isinstance(s["m"], float) for s in samples)
    assert len({s["m"] for s in samples}) == 60
    assert study.trials[0].distributions == {"f/loss.m": optuna.distributions.FloatDistribution(0.5, 2)}


def test_a_log_float_is_drawn_on_a_log_scale() -> None:
    samples, study = drawn({"lr": {"float": [1.0e-6, 1.0e-2], "log": True}}, 200)
    below = sum(s["lr"] < 1e-4 for s in samples)
    assert 70 < below < 130  # a linear scale would give 2
    assert study.trials[0].distributions["f/loss.lr"] == optuna.distributions.FloatDistribution(
        1e-6, 1e-2, log=True
    )


def test_integers_keep_their_step() -> None:
    samples, _ = drawn({"k": {"int": [2, 10], "step": 4}, "n": {"int": [1, 3]}})
    assert {s["k"] for s in samples} == {2, 6, 10}
    assert {s["n"] for s in samples} == {1, 2, 3}


def test_a_list_of_choices_gives_the_values_themselves() -> None:
    samples, _ = drawn({"c": {"choice": [10, "all", True, 0.5], "default": 10}})
    assert {repr(s["c"]) for s in samples} == {"10", "'all'", "True", "0.5"}


def test_fixed_values_are_not_asked_of_optuna() -> None:
    samples, study = drawn({"a": 3, "b": "x", "c": None, "d": False}, 1)
    assert samples == [{"a": 3, "b": "x", "c": None, "d": False}]
    assert study.trials[0].params == {}


def test_conditional_parameters_exist_only_under_their_choice() -> None:
    samples, study = drawn(NESTED, 120)
    always = {"weighting", "classes", "margin", "note"}
    under = {"constant": set(), "power": {"p", "q"}, "exponential": {"beta", "mode"}}
    for values, trial in zip(samples, study.trials, strict=True):
        expected = always | under[values["weighting"]]
        expected |= {"heat"} if values.get("mode") == "soft" else set()
        assert set(values) == expected
        assert set(trial.params) == {f"f/loss.{name}" for name in expected - {"margin", "note"}}
    assert {s["weighting"] for s in samples} == set(under)
    assert {s["heat"] for s in samples if "heat" in s} == {1, 5, 9}


def test_a_given_point_comes_back_as_values() -> None:
    point = {
        "f/loss.weighting": "exponential",
        "f/loss.beta": 3.0,
        "f/loss.mode": "soft",
        "f/loss.heat": 9,
        "f/loss.classes": 20,
    }
    values = spaces.sample(parse_space(NESTED, "loss"), optuna.trial.FixedTrial(point), "f/loss")
    assert values == {
        "weighting": "exponential",
        "beta": 3.0,
        "mode": "soft",
        "heat": 9,
        "classes": 20,
        "margin": 0.5,
        "note": None,
    }


def test_defaults_are_a_point_of_the_space() -> None:
    space = parse_space(NESTED, "loss")
    point = defaults(space, "f/loss")
    assert point == {
        "f/loss.weighting": "exponential",
        "f/loss.beta": 2.0,
        "f/loss.mode": "hard",
        "f/loss.classes": 16,
    }
    values = spaces.sample(space, optuna.trial.FixedTrial(point), "f/loss")
    assert values["beta"] == 2.0
    assert "heat" not in values


def test_a_default_that_is_not_given_is_the_first_value() -> None:
    space = parse_space({"a": {"float": [2, 3]}, "b": {"int": [4, 5]}, "c": {"choice": ["x", "y"]}}, "s")
    assert defaults(space) == {"a": 2.0, "b": 4, "c": "x"}


def test_names_reach_under_every_choice() -> None:
    space = parse_space(NESTED, "loss")
    assert names(space) == {"weighting", "p", "q", "beta", "mode", "heat", "classes", "margin", "note"}


def test_fixing_a_choice_keeps_its_children_and_drops_the_others() -> None:
    space = replaced(parse_space(NESTED, "loss"), "weighting", Fixed("power"))
    assert space["weighting"] == Fixed("power")
    assert space["p"] == Float(0.0, 2.0, 0.0)
    assert names(space) == {"weighting", "p", "q", "classes", "margin", "note"}
    values = spaces.sample(space, optuna.trial.FixedTrial({"p": 0.5, "q": 2.0, "classes": 8}))
    assert values["weighting"] == "power"
    assert values["p"] == 0.5


def test_replacing_reaches_under_choices_and_leaves_the_original() -> None:
    space = parse_space(NESTED, "loss")
    changed = replaced(space, "heat", Int(2, 3, 2))
    changed = replaced(changed, "q", Fixed(4))
    weighting = changed["weighting"]
    assert isinstance(weighting, Choice)
    assert weighting.options["power"]["q"] == Fixed(4)
    mode = weighting.options["exponential"]["mode"]
    assert isinstance(mode, Choice)
    assert mode.options["soft"]["heat"] == Int(2, 3, 2)
    assert changed["classes"] == space["classes"]
    assert space == parse_space(NESTED, "loss")


def test_replacing_a_domain_by_another() -> None:
    space = replaced(parse_space(NESTED, "loss"), "margin", Float(0.1, 0.2, 0.1, log=True))
    assert space["margin"] == Float(0.1, 0.2, 0.1, log=True)


def test_replacing_what_is_not_there() -> None:
    space = parse_space(NESTED, "loss")
    with pytest.raises(KeyError, match="gamma"):
        replaced(space, "gamma", Fixed(1))
    with pytest.raises(ValueError, match=r"^'powr' is no option; did you mean 'power'\?$"):
        replaced(space, "weighting", Fixed("powr"))


def test_the_tree_for_people_names_conditions() -> None:
    space = parse_space(NESTED, "loss")
    lines = [line for name, domain in space.items() for line in domain.lines(name)]
    assert lines[0] == "weighting in {constant, power, exponential}, default exponential"
    assert "    if power: q in [0, 5], default 1" in lines
    assert "        if soft: heat in {1..9}, step 4, default 5" in lines
    assert lines[-2:] == ["margin = 0.5", "note = None"]


DIFFERING = yaml.safe_load("""
name:
  choice:
    a: {p: {float: [0, 1], default: 0.5}, same: {int: [1, 3]}, only: {int: [4, 5]}}
    b: {p: {float: [0, 9], default: 7}, same: {int: [1, 3]}, kind: {choice: {x: {r: {int: [1, 2]}}, y: {}}}}
    c: {kind: {choice: {x: {r: {int: [1, 9]}}, z: {r: {int: [3, 4]}}}}}
    d: {p: 4}
  default: b
margin: {float: [0, 2]}
""")


def asked(space: spaces.Space, **chosen: Any) -> tuple[dict[str, Any], set[str]]:
    """Values at some point where ``chosen`` is chosen, and the names that Optuna was asked for."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({f"f/loss.{name}": value for name, value in chosen.items()})
    trial = study.ask()
    values = spaces.sample(space, trial, "f/loss")
    return values, {name.removeprefix("f/loss.") for name in trial.params}


def test_a_parameter_with_another_domain_under_another_option_is_drawn_as_another() -> None:
    space = parse_space(DIFFERING, "loss")
    values, drawn = asked(space, **{"name": "a", "p@a": 0.25})
    assert drawn == {"name", "p@a", "same", "only", "margin"}
    assert (values["p"], set(values)) == (0.25, {"name", "p", "same", "only", "margin"})
    values, drawn = asked(space, **{"name": "b", "kind@b": "x", "r@b": 2})
    assert drawn == {"name", "p@b", "same", "kind@b", "r@b", "margin"}
    assert (values["kind"], values["r"]) == ("x", 2)
    values, drawn = asked(space, **{"name": "c", "kind@c": "x", "r@c@x": 9})
    assert drawn == {"name", "kind@c", "r@c@x", "margin"}
    assert values["r"] == 9
    values, drawn = asked(space, name="d")
    assert drawn == {"name", "margin"}
    assert values["p"] == 4


def test_any_number_of_trials_with_such_a_parameter_makes_one_study() -> None:
    samples, study = drawn(DIFFERING, 100)
    assert {s["name"] for s in samples} == {"a", "b", "c", "d"}
    for values, trial in zip(samples, study.trials, strict=True):
        assert trial.params.get(f"f/loss.p@{values['name']}", 4) == values.get("p", 4)


def test_the_defaults_of_such_a_parameter() -> None:
    space = parse_space(DIFFERING, "loss")
    point = defaults(space, "f/loss")
    assert point == {
        "f/loss.name": "b",
        "f/loss.p@b": 7.0,
        "f/loss.same": 1,
        "f/loss.kind@b": "x",
        "f/loss.r@b": 1,
        "f/loss.margin": 0.0,
    }
    assert spaces.sample(space, optuna.trial.FixedTrial(point), "f/loss")["p"] == 7.0


def test_the_lines_and_names_of_such_a_parameter() -> None:
    space = parse_space(DIFFERING, "loss")
    assert names(space) == {"name", "p", "same", "only", "kind", "r", "margin"}
    assert {"p@a", "p@d", "same@b", "r@x", "r@b"} <= spaces.names_under_options(space)
    lines = space["name"].lines("loss.name")
    assert "    if a: p in [0, 1], default 0.5" in lines
    assert "    if b: p in [0, 9], default 7" in lines
    assert "        if z: r in {3..4}, default 3" in lines


def test_replacing_such_a_parameter_everywhere_and_under_one_option() -> None:
    space = parse_space(DIFFERING, "loss")
    everywhere = replaced(space, "p", Float(1, 2, 1))
    assert asked(everywhere, name="a")[1] == {"name", "p", "same", "only", "margin"}
    assert asked(everywhere, name="d")[1] == {"name", "p", "margin"}
    one = replaced(space, "p@b", Fixed(3))
    assert asked(one, name="b")[0]["p"] == 3
    assert asked(one, **{"name": "a", "p@a": 0.25})[0]["p"] == 0.25
    assert asked(replaced(space, "same@a", Fixed(3)), name="b")[1] >= {"same@b"}
    deep = replaced(space, "r@c@x", Fixed(5))
    assert asked(deep, **{"name": "c", "kind@c": "x"})[0]["r"] == 5
    assert asked(deep, **{"name": "c", "kind@c": "z"})[0]["r"] in (3, 4)
    assert asked(deep, **{"name": "b", "kind@b": "x"})[0]["r"] in (1, 2)
    for unknown in ("p@c", "p@", "only@b", "margin@a", "r@x@c"):
        with pytest.raises(KeyError, match=unknown):
            replaced(space, unknown, Fixed(1))


def test_fixing_the_choice_leaves_plain_names() -> None:
    space = replaced(parse_space(DIFFERING, "loss"), "name", Fixed("b"))
    assert asked(space, kind="x")[1] == {"p", "same", "kind", "r", "margin"}


def test_corners_turn_each_parameter_in_each_place() -> None:
    space = parse_space(DIFFERING, "loss")
    start = defaults(space)
    seen = [spaces.sample(space, optuna.trial.FixedTrial(start | change)) for change in spaces.corners(space)]
    for expected in (
        {"name": "a", "p": 1.0, "same": 1},
        {"name": "a", "same": 3, "p": 0.5},  # the same domain as under b, and turned under both
        {"name": "b", "same": 3, "p": 7.0},
        {"name": "b", "p": 0.0, "kind": "x", "r": 1},
        {"name": "b", "p": 7.0, "kind": "y"},
        {"name": "c", "kind": "x", "r": 9},
        {"name": "c", "kind": "z", "r": 4},
        {"name": "d", "p": 4},
        {"name": "b", "margin": 2.0},
    ):
        assert any(expected.items() <= values.items() for values in seen), expected


MALFORMED: list[tuple[str, str]] = [
    ("[1, 2]", "loss.x: expected a value or a domain such as {float: [0, 1]}, got [1, 2]"),
    ("{}", "loss.x: a domain has one of the keys float, int, choice; known: choice, float, int"),
    ("{flaot: [0, 1]}", "loss.x: a domain has one of the keys float, int, choice; did you mean 'float'?"),
    ("{float: [0, 1], defualt: 1}", "loss.x.defualt: unknown key; did you mean 'default'?"),
    ("{float: [0, 1], step: 1}", "loss.x.step: unknown key; known: default, float, log"),
    ("{choice: [a], log: true}", "loss.x.log: unknown key; known: choice, default"),
    ("{float: [0, 1], int: [0, 1]}", "loss.x.int: unknown key; known: default, float, log"),
    ("{float: 3}", "loss.x.float: expected [low, high], two numbers, got 3"),
    ("{float: [0, 1, 2]}", "loss.x.float: expected [low, high], two numbers, got [0, 1, 2]"),
    ("{float: [0, high]}", "loss.x.float: expected [low, high], two numbers, got [0, 'high']"),
    ("{int: [false, true]}", "loss.x.int: expected [low, high], two numbers, got [False, True]"),
    ("{float: [2, 1]}", "loss.x.float: low 2 is above high 1; swap them"),
    ("{float: [0, 1], log: true}", "loss.x.float: a log scale needs low > 0, got 0"),
    ("{int: [0, 8], log: true}", "loss.x.int: a log scale needs low > 0, got 0"),
    ("{float: [0, 1], default: 2}", "loss.x.default: 2 is outside [0, 1]"),
    ("{float: [0, 1], default: a}", "loss.x.default: 'a' is outside [0, 1]"),
    ("{int: [0, 1.5]}", "loss.x.int: expected an integer, got 1.5"),
    ("{int: [0, 4], default: 1.5}", "loss.x.default: expected an integer, got 1.5"),
    ("{int: [0, 4], step: 0.5}", "loss.x.step: expected an integer, got 0.5"),
    ("{int: [0, 5], step: 2}", "loss.x.step: 2 does not lead from 0 to 5 over the default 0"),
    ("{int: [0, 6], step: 2, default: 3}", "loss.x.step: 2 does not lead from 0 to 6 over the default 3"),
    ("{int: [0, 6], step: 0}", "loss.x.step: 0 does not lead from 0 to 6 over the default 0"),
    ("{choice: []}", "loss.x.choice: is empty; give at least one value"),
    ("{choice: 3}", "loss.x.choice: expected a list of values or a mapping of values to parameters"),
    (
        "{choice: [[1]]}",
        "loss.x.choice: expected a list of values or a mapping of values to parameters, got [1] in it",
    ),
    ("{choice: [a, b], default: c}", "loss.x.default: 'c' is no option; known: a, b"),
    ("{choice: [adam, sgd], default: adma}", "loss.x.default: 'adma' is no option; did you mean 'adam'?"),
    ("{choice: {a: 3}}", "loss.x.choice.a: expected a mapping of parameters to domains, got 3"),
    ("{choice: {a: {p: {float: [1, 0]}}}}", "loss.x.choice.a.p.float: low 1 is above high 0; swap them"),
    # Each of these was let through at first, and failed in Optuna or in Python.
    ("{float: [0, .inf]}", "loss.x.float: expected [low, high], two numbers, got [0, inf]"),
    ("{float: [.nan, 1]}", "loss.x.float: expected [low, high], two numbers, got [nan, 1]"),
    ("{float: [0.1, 1], log: sure}", "loss.x.log: expected true or false, got 'sure'"),
    ("{int: [1, 9], step: 2, log: true}", "loss.x.step: a log scale has no step; leave one of them out"),
    ("{choice: [a, b], default: [a]}", "loss.x.default: ['a'] is no option; known: a, b"),
    (
        "{choice: {null: {}}}",
        "loss.x.choice: expected a list of values or a mapping of values to parameters, got None in it",
    ),
    (
        "{choice: [1, .inf]}",
        "loss.x.choice: expected a list of values or a mapping of values to parameters, got inf in it",
    ),
    (
        f"{{int: [2, {10**400}]}}",
        "loss.x.int: expected [low, high], two numbers, got [2, a number of 1329 bits]",
    ),
    (f"{{int: [2, 4], step: {10**400}}}", "loss.x.step: expected an integer, got a number of 1329 bits"),
    (
        "{float: [-1.0e+308, 1.0e+308]}",
        "loss.x.float: -1e+308 and 1e+308 lie further apart than a number can say",
    ),
    (".inf", "loss.x: expected a value or a domain such as {float: [0, 1]}, got inf"),
    (f"{{choice: {list(range(1001))}}}", "loss.x.choice: 1001 values, and at most 1000 are; give fewer"),
    ("{float: [1e-5, one]}", "loss.x.float: expected [low, high], two numbers, got ['1e-5', 'one']"),
    ("{choice: [1, true]}", "loss.x.choice: True equals another value; leave one of them out"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED, ids=[text for text, _ in MALFORMED])
def test_a_malformed_domain_is_named_with_its_mend(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole text is compared
        parse_domain(yaml.safe_load(text), "loss.x")
    assert str(caught.value) == message


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    text = "{float: [1e-5, 1E+3], log: true, default: 2e-4}"
    assert parse_domain(yaml.safe_load(text), "loss.x") == Float(1e-5, 1e3, 2e-4, log=True)
    assert parse_domain("1e5", "loss.x") == Fixed("1e5")  # a name may look like that
    assert [spaces.as_number(each) for each in ("1e-5", "-.5e3", "1e5x", "e5", "1e", 3)] == [
        1e-5, -500.0, "1e5x", "e5", "1e", 3,
    ]  # fmt: skip


def test_a_space_that_is_no_mapping() -> None:
    with pytest.raises(ValueError, match=r"^loss: expected a mapping of parameters to domains, got \['p'\]$"):
        parse_space(["p"], "loss")


def test_a_parameter_is_not_named_like_the_choice_it_stands_under() -> None:
    with pytest.raises(ValueError, match=r"^loss: x stands in two places; rename one$"):
        parse_space({"x": yaml.safe_load("{choice: {a: {y: {choice: {b: {x: 1}}}}}}")}, "loss")


@pytest.mark.parametrize("other", ["{float: [0, 1]}", "{choice: {c: {p: {int: [1, 2]}}}}"])
def test_one_name_means_one_parameter(other: str) -> None:
    key = "p" if "float" in other else "y"
    space = {"x": yaml.safe_load("{choice: {a: {p: 1}, b: {}}}"), key: yaml.safe_load(other)}
    with pytest.raises(ValueError, match=r"^loss: p stands in two places; rename one$"):
        parse_space(space, "loss")
