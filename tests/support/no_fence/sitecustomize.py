"""Takes the fence away from the actors of a machine, for the test that shows what it is there for."""

import sys

if any("default_worker.py" in word for word in sys.orig_argv):
    from trivet.cluster import fence

    fence._ALONE_SHARE = 1e9
