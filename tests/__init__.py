"""The tests, which mirror the folders that they test, and in `tests.shared` what several of them share."""
