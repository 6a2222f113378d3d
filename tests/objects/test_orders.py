"""Any order of changes and calls: two functions share objects, and each call sees these as they are."""

import types

import numpy as np

from support.examples import examples, given, st
from support.sessions import lasting

session = lasting(2)

STEPS = st.one_of(
    st.tuples(st.just("in place"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("anew"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("pop"), st.integers(0, 2), st.none()),
    st.tuples(st.just("swap"), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("number"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("call"), st.integers(0, 1), st.none()),
    st.tuples(st.just("call"), st.integers(0, 1), st.none()),
    st.tuples(st.just("submit"), st.integers(0, 1), st.none()),
)


class World:
    """Objects of all kinds, nested, and what is done to them."""

    def __init__(self):
        self.model = types.SimpleNamespace(w=np.ones(2), rate=1.0)
        self.config = {"layers": [np.ones(2), np.ones(2)], "bias": np.ones(2), "rate": 1.0}
        self.parts = [types.SimpleNamespace(w=np.ones(2), name="a")]
        self.submitted = []

    def places(self):
        """Where arrays are: what holds each, and its key there."""
        found = [(vars(self.model), "w"), (self.config, "bias")]
        found += [(self.config["layers"], index) for index in range(len(self.config["layers"]))]
        return found + [(vars(part), "w") for part in self.parts]

    def place(self, number):
        places = self.places()
        return places[number % len(places)]

    def do(self, step, functions):
        what, number, value = step
        match what:
            case "in place":
                holder, key = self.place(number)
                holder[key][value % 2] = value
            case "anew":
                holder, key = self.place(number)
                holder[key] = np.full(2, float(value))
            case "append" if number < 2:
                self.config["layers"].append(np.full(2, float(value)))
            case "append":
                self.parts.append(types.SimpleNamespace(w=np.full(2, float(value)), name="b"))
            case "pop":
                held = self.config["layers"] if number < 2 else self.parts
                if held:
                    held.pop(0)
            case "swap":
                (one, key), (other, name) = self.place(number), self.place(value)
                one[key], other[name] = other[name], one[key]
            case "number":
                holder = [vars(self.model), self.config, self.config][number]
                holder["rate"] = float(value)
            case "call":
                f, plain = functions[number]
                assert np.array_equal(f(), plain())
            case "submit":
                f, plain = functions[number]
                self.submitted.append((f.submit(), plain()))


@given(steps=st.lists(STEPS, min_size=3, max_size=30))
@examples(120)
def test_two_functions_of_the_same_objects(session, steps):
    world = World()
    model, config, parts = world.model, world.config, world.parts

    def first():
        arrays = [model.w * model.rate, config["bias"], *config["layers"]]
        return np.array([sum(float(a[0]) for a in arrays), sum(float(a[1]) for a in arrays)])

    def second():
        arrays = [part.w for part in parts] + [layer * config["rate"] for layer in config["layers"]]
        return np.array([len(parts), sum(float(a[0] + 2 * a[1]) for a in arrays), model.w.sum()])

    functions = [(session.function(plain, outputs="max"), plain) for plain in (first, second)]
    for step in steps:
        world.do(step, functions)
    for future, expected in world.submitted:
        assert np.array_equal(future.result(), expected)
    for f, plain in functions:
        assert np.array_equal(f(), plain())
