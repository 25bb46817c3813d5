"""`OptimizerState`: which states fit an optimizer and variables, and what the messages say otherwise."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shoal import errors, optim
from shoal._session.inputs import state_of
from shoal.initializers import Given, Ones
from shoal.optim import OptimizerState, checked_state
from shoal.variables import Variable, variable_from_array

ADAM = optim.Adam()
VARIABLES = {
    "w": variable_from_array(np.zeros((2, 3))),
    "half": variable_from_array(np.zeros(2, ml_dtypes.bfloat16)),
    "rule": Variable((2,), initializer=Ones()),
    "count": variable_from_array(np.zeros(2, np.int64)),
}


def both(**arrays: Any) -> OptimizerState:
    return OptimizerState({"exp_avg": arrays, "exp_avg_sq": arrays}, updates=7)


class TestSlotsOfOptimizers:
    def test_the_names_are_those_of_checkpoints(self) -> None:
        names = {it.__name__: it.possible_slots for it in optim.Optimizer.registry.values()}
        assert {name: [it.name for it in slots] for name, slots in names.items()} == {
            "SGD": [],
            "Momentum": ["momentum_buffer"],
            "Adagrad": ["accumulator"],
            "RMSProp": ["square_avg", "grad_avg", "momentum_buffer"],
            "Adam": ["exp_avg", "exp_avg_sq"],
            "AdamW": ["exp_avg", "exp_avg_sq"],
            "FTRL": ["accumulator", "linear"],
        }

    def test_some_exist_with_an_argument_only(self) -> None:
        assert optim.RMSProp().slots == ("square_avg",)
        assert optim.RMSProp(centered=True, momentum=0.9).slots == ("square_avg", "grad_avg", "momentum_buffer")

    def test_initial_values(self) -> None:
        assert optim.Adagrad(initial_accumulator_value=0.5).initial("accumulator") == 0.5
        assert (optim.FTRL().initial("accumulator"), optim.FTRL().initial("linear")) == (0.1, 0)


class TestCheckedState:
    def test_variables_without_arrays_begin_as_in_a_new_job(self) -> None:
        given = OptimizerState({"accumulator": {"w": np.full((2, 3), 4.0)}}, 3)
        found = checked_state(given, optim.Adagrad(initial_accumulator_value=0.5), VARIABLES)
        accumulator = found.slots["accumulator"]
        assert (found.updates, sorted(accumulator)) == (3, ["half", "rule", "w"])
        assert accumulator["w"].tolist() == np.full((2, 3), 4.0).tolist()
        assert (accumulator["half"].dtype, accumulator["half"].tolist()) == (np.float32, [0.5, 0.5])

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
    def test_slots_of_halves_are_float32(self, dtype: Any) -> None:
        found = checked_state(both(half=np.ones(2, dtype)), ADAM, VARIABLES)
        assert found.slots["exp_avg"]["half"].dtype == np.float32

    def test_updates_alone_are_enough(self) -> None:
        assert checked_state(OptimizerState(updates=9), ADAM, VARIABLES) == OptimizerState(updates=9)

    @pytest.mark.parametrize(
        ("state", "optimizer", "said"),
        [
            (both(w=np.zeros((2, 3))), optim.SGD(), "sgd has no slot 'exp_avg'; it has none, so leave the slots out"),
            (OptimizerState({"m": {}}), ADAM, "adam has no slot 'm'; the slots of adam are exp_avg, exp_avg_sq"),
            (OptimizerState({"exp_avg": {}}), ADAM, "exp_avg_sq is missing; the slots of adam are"),
            (both(x=np.zeros(2)), ADAM, "exp_avg of 'x' is there, but the job has no such variable; leave it out"),
            (both(count=np.zeros(2)), ADAM, "exp_avg of 'count' is there, but the variable is not trainable"),
            (both(rule=np.zeros(2)), ADAM, "has a rule for its initial values; give its values as an array, too"),
            (
                both(w=np.zeros(6)),
                ADAM,
                r"exp_avg of 'w' has the shape \(6,\); give the shape of the variable",
            ),
            (both(w=np.zeros((2, 3), np.float32)), ADAM, "exp_avg of 'w' is float32; cast it to float64"),
            (both(w=np.full((2, 3), np.nan)), ADAM, "exp_avg of 'w' has NaN or Inf; give finite values"),
            (both(w=np.full((2, 3), -1.0)), ADAM, "exp_avg_sq of 'w' has -1.0; its values are at least 0"),
        ],
    )
    def test_others_are_refused(self, state: OptimizerState, optimizer: optim.Optimizer, said: str) -> None:
        with pytest.raises(errors.InvalidOptimizer, match=f"the optimizer state does not fit the job: .*{said}"):
            checked_state(state, optimizer, VARIABLES)

    def test_without_given_values_there_is_nothing_that_it_belongs_to(self) -> None:
        with pytest.raises(errors.InvalidOptimizer, match="no trainable variable has given values"):
            checked_state(OptimizerState(updates=1), ADAM, {"rule": VARIABLES["rule"]})

    @pytest.mark.parametrize(
        ("slots", "updates", "error", "said"),
        [
            ([], 0, errors.InvalidOptimizer, r"the slots of an optimizer state are \[\]; give a dict"),
            ({1: {}}, 0, errors.InvalidOptimizer, "give a dict by the names of slots"),
            ({}, -1, errors.BadRequest, "updates is -1; it must be a whole number, 0 or more"),
            ({}, 1.5, errors.BadRequest, "updates is 1.5"),
            ({}, 2**53, errors.InvalidOptimizer, "the limit MAX_STEP"),
        ],
    )
    def test_what_is_no_state(self, slots: Any, updates: Any, error: type[Exception], said: str) -> None:
        with pytest.raises(error, match=said):
            OptimizerState(slots, updates)


class TestStateOfASession:
    options: Mapping[str, Any] = {"optimizer": ADAM}

    def test_slots_may_be_trees(self) -> None:
        tree = {"layers": [{"w": np.ones(2)}, {"w": np.ones(3)}]}
        variables = {"layers/0/w": np.zeros(2), "layers/1/w": np.zeros(3)}
        found = state_of(OptimizerState({"exp_avg": tree, "exp_avg_sq": tree}), self.options, variables)
        assert found.slots["exp_avg"]["layers/1/w"].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(
        ("state", "options", "variables", "said"),
        [
            ({"exp_avg": {}}, options, VARIABLES, "give a shoal.optim.OptimizerState"),
            (both(), {}, VARIABLES, "without variables or without optimizer; give both"),
            (both(), options, None, "without variables or without optimizer; give both"),
            (both(), {**options, "restore": "m/3"}, VARIABLES, "restore='m/3' are both given"),
            (OptimizerState({"exp_avg": np.ones(2)}), options, VARIABLES, "slot 'exp_avg' of the optimizer state is a"),
            (both(w="x"), options, VARIABLES, "exp_avg of 'w': a str of dtype <U1 is not an array of numbers"),
        ],
    )
    def test_what_a_session_refuses(self, state: Any, options: Any, variables: Any, said: str) -> None:
        with pytest.raises((errors.BadRequest, errors.InvalidOptimizer), match=said):
            state_of(state, options, variables)

    def test_a_checkpoint_that_may_exist_is_no_contradiction(self) -> None:
        assert state_of(both(), {**self.options, "restore": "auto"}, VARIABLES).updates == 7


def test_variables_say_that_they_come_with_a_state() -> None:
    """So sessions with other states are refused, and so are servers that do not know states."""
    message = VARIABLES["w"].with_state(0).to_proto("w")
    assert dict(message.initializer.parameters) == {"state": 1}
    assert not VARIABLES["w"].to_proto("w").initializer.parameters
    assert VARIABLES["rule"].with_state(3) is VARIABLES["rule"]
    assert VARIABLES["count"].with_state(3) is VARIABLES["count"]
    for state in (-1, 0.5, 2.0**54):
        with pytest.raises(errors.InvalidVariable, match=r"state is .*; it must be a whole number from 0 to 2"):
            Variable((2,), initializer=Given(state))
