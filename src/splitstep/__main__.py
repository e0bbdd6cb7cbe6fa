"""`python -m splitstep` is the command `splitstep`."""

from splitstep.cli import main

main()
