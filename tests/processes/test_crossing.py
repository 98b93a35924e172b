"""What crosses to another process, and how an error names what does not."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading

import pytest

from rlcollect.errors import OptionError
from rlcollect.processes.crossing import packed, unpacked

FACTOR = 10
LOCK = threading.Lock()
times = lambda value: value * FACTOR  # noqa: E731 - it is a lambda that is to cross


def scaled(value):
    return value * FACTOR


def uses_a_lock():
    with LOCK:
        return 1


class Shelf:
    def __init__(self, **things):
        self.__dict__.update(things)

    def look(self):
        return vars(self)

    def __repr__(self):
        return "Shelf()"


def crossed(value):
    return unpacked(packed(value, "create_env_fn"))


def closing_over(value):
    def make():
        return value

    return make


class TestWhatCrosses:
    def test_values(self):
        assert crossed({"a": [1, (2.5, None)]}) == {"a": [1, (2.5, None)]}

    def test_functions_of_modules(self):
        assert crossed(scaled)(3) == 30

    def test_lambdas(self):
        assert crossed(lambda x: x + 1)(1) == 2
        assert crossed(times)(3) == 30

    def test_closures(self):
        assert crossed(closing_over([1, 2]))() == [1, 2]

    def test_partials(self):
        assert crossed(functools.partial(lambda a, b: (a, b), 1, b=2))() == (1, 2)

    def test_methods(self):
        assert crossed(Shelf(a=1).look)() == {"a": 1}

    def test_classes_defined_in_functions(self):
        class Local:
            def __init__(self, value=3):
                self.value = value

            def double(self):
                return 2 * self.value

        assert crossed(Local)().double() == 6
        assert crossed(Local(4)).double() == 8
        assert crossed(Local(5).double)() == 10

    def test_functions_that_call_each_other(self):
        def even(n):
            return True if n == 0 else odd(n - 1)

        def odd(n):
            return False if n == 0 else even(n - 1)

        assert crossed(even)(10)
        assert not crossed(even)(7)

    def test_a_copy_comes_out(self):
        things = [1]
        crossed(closing_over(things))().append(2)
        assert things == [1]

    @pytest.mark.parametrize("name", ["lambda", "closure", "class"])
    def test_by_value_to_where_their_module_is_not_known(self, name, tmp_path):
        class Local:
            def __call__(self):
                return FACTOR + 1

        value = {"lambda": lambda: times(1) + 1, "closure": closing_over(FACTOR + 1), "class": Local()}[name]
        program = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1]))())"
        done = subprocess.run(
            [sys.executable, "-c", program, packed(value, "policy").hex()],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
        assert done.stdout == "11\n", done.stderr


def culprit(value, name="create_env_fn"):
    with pytest.raises(OptionError) as raised:
        packed(value, name)
    text = str(raised.value)
    assert text.startswith(f"{name}=")
    assert "cannot be sent to a worker process" in text
    assert raised.value.__cause__ is not None
    return text.partition("worker process: ")[2].partition(", which cannot be pickled")[0]


class TestTheCulprit:
    def test_itself(self):
        assert culprit(LOCK, "policy") == f"policy is {LOCK!r}"

    def test_in_a_closure(self):
        assert culprit(closing_over(LOCK)) == f"create_env_fn -> value is {LOCK!r}"

    def test_in_a_lambda(self):
        lock = threading.Lock()
        assert culprit(lambda: lock) == f"create_env_fn -> lock is {lock!r}"

    def test_in_the_attributes_of_what_a_closure_holds(self):
        shelf = Shelf(a=1, lock=LOCK)
        assert culprit(closing_over(shelf)) == f"create_env_fn -> value.lock is {LOCK!r}"

    def test_in_attributes(self):
        assert culprit(Shelf(a=1, b=Shelf(lock=LOCK))) == f"create_env_fn.b.lock is {LOCK!r}"

    def test_of_a_method(self):
        assert culprit(Shelf(lock=LOCK).look) == f"create_env_fn.__self__.lock is {LOCK!r}"

    def test_in_the_arguments_of_a_partial(self):
        assert culprit(functools.partial(scaled, 1, LOCK)) == f"create_env_fn.args[1] is {LOCK!r}"

    def test_in_the_keywords_of_a_partial(self):
        assert culprit(functools.partial(scaled, value=LOCK)) == f"create_env_fn.keywords['value'] is {LOCK!r}"

    def test_in_the_function_of_a_partial(self):
        assert culprit(functools.partial(closing_over(LOCK))) == f"create_env_fn.func -> value is {LOCK!r}"

    def test_in_dicts_and_lists(self):
        assert culprit({"a": 1, "b": [0, LOCK]}, "reset_options") == f"reset_options['b'][1] is {LOCK!r}"
        assert culprit((1, {"x": LOCK}), "reset_options") == f"reset_options[1]['x'] is {LOCK!r}"

    def test_in_what_a_function_takes_from_its_module(self):
        def uses():
            return LOCK.locked()

        assert culprit(uses) == f"create_env_fn -> LOCK is {LOCK!r}"

    def test_functions_of_modules_take_theirs_along_by_name(self):
        assert crossed(uses_a_lock)() == 1

    def test_something_that_refuses(self):
        class Proud:
            def __reduce__(self):
                raise RuntimeError("I stay here")

            def __repr__(self):
                return "Proud()"

        with pytest.raises(OptionError, match=r"create_env_fn -> value is Proud\(\).*RuntimeError: I stay here"):
            packed(closing_over(Proud()), "create_env_fn")

    def test_in_a_ring(self):
        ring = Shelf(lock=LOCK)
        ring.self = ring
        assert culprit(ring) == f"create_env_fn.lock is {LOCK!r}"
        first = Shelf()
        first.other = Shelf(first=first, lock=LOCK)
        with pytest.raises(OptionError, match="cannot be pickled"):
            packed(first, "create_env_fn")

    def test_what_is_not_set_yet_is_passed_over(self):
        def make():
            return later, lock

        lock = threading.Lock()
        assert culprit(make) == f"create_env_fn -> lock is {lock!r}"
        later = 1
        assert later

    def test_says_what_to_do(self):
        with pytest.raises(OptionError, match="inside the function"):
            packed(closing_over(LOCK), "create_env_fn")


@pytest.mark.slow  # two interpreters
def test_what_a_spawned_programs_main_module_defines_crosses_by_value(tmp_path):
    """It is the main module there too, and nobody else's: whoever gets it finds it nowhere."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, pickle
            from rlcollect.processes.crossing import packed

            class Own:
                value = 3

            def child(pipe):
                pipe.send(packed(Own(), "it"))

            if __name__ == "__main__":
                here, there = multiprocessing.Pipe()
                process = multiprocessing.get_context("spawn").Process(target=child, args=(there,))
                process.start()
                data = here.recv()
                del Own
                assert pickle.loads(data).value == 3
                process.join()
            """
        )
    )
    subprocess.run([sys.executable, script], check=True, timeout=60)
