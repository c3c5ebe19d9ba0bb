"""Quiet: keeps TensorFlow's start-up messages from drowning what a program has to say.

TensorFlow logs its start from C++, straight to file descriptor 2, some of it whatever TF_CPP_MIN_LOG_LEVEL says.
`train.py` starts it inside `quiet_start()`; what was held back is shown if the start fails. Later nothing is held back.
"""

import contextlib
import os
import signal
import sys
import tempfile


@contextlib.contextmanager
def quiet_start(quiet=True):
    """Holds back what is written to stderr inside the `with` block; shows it if the block raises what is not ours.

    Args:
      quiet: False holds nothing back and lets TensorFlow log all it has to say.
    """
    if not quiet:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        yield
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its errors come as exceptions as well
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except ValueError:  # one of ours, which says all there is to say
            raise
        except KeyboardInterrupt:  # whoever presses Ctrl-C does not want to know which import it came in
            raise SystemExit(128 + signal.SIGINT) from None
        except BaseException:
            held_back.seek(0)
            os.write(stderr, held_back.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
