"""`Failure`: an exception on its way from a worker, with its type, its text and the report of who and where."""

from __future__ import annotations

import pickle
import threading
import traceback

import cloudpickle
import pytest

from rlcollect.errors import EnvError, RlcollectError, WorkerError
from rlcollect.failures import relayed
from rlcollect.processes.relay import Failure


def raised(error):
    """As if it had been raised by a line of its own."""
    try:
        raise_it_here(error)
    except BaseException as caught:
        return caught


def raise_it_here(error):
    raise error


def crossed(error, worker=3):
    """What comes out in the program."""
    return pickle.loads(cloudpickle.dumps(Failure.of(raised(error), worker))).raised()


WORDS = {}


class CodedError(Exception):
    """Its constructor takes a keyword, and no text."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class PairedError(Exception):
    """Its constructor takes other arguments than it passes on."""

    def __init__(self, left, right):
        super().__init__(left + right)
        self.left, self.right = left, right


class MuteError(Exception):
    """Passes nothing on; its text is made of its attributes."""

    def __init__(self, code):
        self.code = code

    def __str__(self):
        return f"mute {self.code}"


class HolderError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class FragileError(Exception):
    """Has a text where its module has it."""

    def __str__(self):
        return WORDS["gone"]


class ChoosyError(Exception):
    """Cannot be made without a keyword."""

    def __new__(cls, *args, key):
        return super().__new__(cls, *args)

    def __init__(self, *args, key):
        super().__init__(*args)


class TestTheException:
    @pytest.mark.parametrize(
        "error",
        [
            ValueError("a", 1),
            KeyError("k"),
            RuntimeError(),
            ZeroDivisionError("x"),
            OSError(2, "No such file"),
            AssertionError("no"),
            ExceptionGroup("several", [ValueError(1), KeyError(2)]),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_those_of_python(self, error):
        came = crossed(error)
        assert type(came) is type(error)
        assert repr(came) == repr(error)
        assert str(came) == str(error)

    def test_a_file_that_is_not_there_keeps_its_name(self):
        came = crossed(FileNotFoundError(2, "No such file or directory", "/nowhere/at all"))
        assert type(came) is FileNotFoundError
        assert (came.errno, came.filename) == (2, "/nowhere/at all")
        assert str(came) == "[Errno 2] No such file or directory: '/nowhere/at all'"

    def test_a_text_that_cannot_be_decoded_keeps_its_place(self):
        came = crossed(UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"))
        assert type(came) is UnicodeDecodeError
        assert (came.object, came.start, came.reason) == (b"ab\xff", 2, "invalid start byte")
        assert str(came) == "'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"

    def test_a_module_that_is_not_there_keeps_its_name(self):
        came = crossed(ModuleNotFoundError("No module named 'gone'", name="gone"))
        assert type(came) is ModuleNotFoundError
        assert came.name == "gone"

    def test_odd_constructors(self):
        came = crossed(CodedError(code=7))
        assert (type(came), str(came), came.code) == (CodedError, "code 7", 7)
        came = crossed(PairedError("a", "b"))
        assert (type(came), came.args, came.left, came.right) == (PairedError, ("ab",), "a", "b")
        came = crossed(MuteError(5))
        assert (type(came), str(came)) == (MuteError, "mute 5")

    def test_attributes(self):
        error = ValueError("x")
        error.details = {"a": [1, 2]}
        assert crossed(error).details == {"a": [1, 2]}

    def test_local_classes_come_back_as_the_same(self):
        class LocalError(LookupError):
            pass

        came = crossed(LocalError("here"))
        assert type(came) is LocalError
        assert came.args == ("here",)

    def test_ours(self):
        assert type(crossed(EnvError("odd"))) is EnvError


class TestWhatCannotBeMadeAgain:
    @pytest.mark.parametrize(
        "error",
        [HolderError("held"), ChoosyError("choosy", key=1), ValueError(threading.Lock())],
        ids=["attribute", "constructor", "argument"],
    )
    def test_is_a_report_with_its_text(self, error):
        came = crossed(error)
        assert type(came) is WorkerError
        assert type(error).__name__ in str(came)
        assert str(error) in str(came)
        assert "raise_it_here" in came.worker_traceback
        assert came.worker == 3

    def test_also_where_only_the_text_is_missing(self, monkeypatch):
        """Its module is another one here."""
        monkeypatch.setitem(WORDS, "gone", "fragile 1")
        failure = Failure.of(raised(FragileError()), 0)
        monkeypatch.delitem(WORDS, "gone")
        came = failure.raised()
        assert type(came) is WorkerError
        assert "fragile 1" in str(came)

    def test_a_text_that_fails_in_the_worker_too(self):
        came = crossed(FragileError())
        assert isinstance(came, WorkerError | FragileError)
        assert "FragileError" in (came if isinstance(came, WorkerError) else came.__cause__).worker_traceback

    @pytest.mark.parametrize("kind", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
    def test_what_would_be_misread_is_a_report_too(self, kind):
        """DESIGN 9.15: nobody typed Ctrl-C here, and no iterator of the program ended."""
        came = crossed(kind("odd"))
        assert isinstance(came, WorkerError)
        assert kind.__name__ in str(came)


class TestTheReport:
    def test_is_the_cause(self):
        came = crossed(ValueError("odd"), worker=2)
        report = came.__cause__
        assert type(report) is WorkerError
        assert (report.worker, report.lane, report.step) == (2, None, 0)
        assert "ValueError: odd" in str(report)
        assert "worker 2" in str(report)

    def test_has_the_traceback(self):
        text = crossed(ValueError("odd")).__cause__.worker_traceback
        assert text.startswith("Traceback")
        assert "in raise_it_here" in text
        assert text.rstrip().endswith("ValueError: odd")

    def test_the_traceback_is_shown_where_the_error_is(self):
        shown = "".join(traceback.format_exception(crossed(ValueError("odd"))))
        assert "in raise_it_here" in shown
        assert shown.rstrip().endswith("ValueError: odd")

    def test_the_traceback_has_what_came_before(self):
        error = ValueError("late")
        error.__cause__ = KeyError("early")
        assert "KeyError: 'early'" in crossed(error).__cause__.worker_traceback

    def test_notes_are_in_the_traceback(self):
        error = ValueError("odd")
        error.add_note("look at lane 3")
        assert "look at lane 3" in "".join(traceback.format_exception(crossed(error)))

    def test_one_that_came_with_it_is_taken(self):
        error = relayed(raised(ValueError("odd")), worker=5, lane=1, step=17)
        came = crossed(error, worker=5)
        report = came.__cause__
        assert type(came) is ValueError
        assert (report.worker, report.lane, report.step) == (5, 1, 17)
        assert "worker 5, lane 1, step 17" in str(report)
        assert "raise_it_here" in report.worker_traceback

    def test_a_report_itself(self):
        came = crossed(WorkerError("odd", worker=5, lane=2, step=9, worker_traceback="as it was"), worker=5)
        assert type(came) is WorkerError
        assert isinstance(came, RlcollectError)
        assert (str(came), came.worker, came.lane, came.step) == ("odd", 5, 2, 9)
        assert came.worker_traceback == "as it was"

    def test_of_an_exception_that_cannot_be_made_again(self):
        error = relayed(raised(HolderError("held")), worker=5, lane=1, step=17)
        came = crossed(error, worker=5)
        assert type(came) is WorkerError
        assert (came.worker, came.lane, came.step) == (5, 1, 17)
        assert "HolderError: held" in str(came)

    def test_raising_it_twice_gives_two(self):
        failure = Failure.of(raised(ValueError("odd")), 0)
        one, other = failure.raised(), failure.raised()
        assert one is not other
        assert one.__cause__ is not other.__cause__
