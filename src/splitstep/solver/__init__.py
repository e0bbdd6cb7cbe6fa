"""The numerical ideas as data, and the loops that advance particles."""
