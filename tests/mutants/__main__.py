import signal
import sys

from tests.mutants.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # tests under way end with this process
    sys.exit(main(sys.argv[1:]))
