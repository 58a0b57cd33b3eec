"""The checks of servers of Tinker's API, one file per part of the table."""
