"""Check that no user is in two updates of a run: the run's epsilon is that of a single update only if so."""

from __future__ import annotations

from dptune.errors import DptuneError


class UserReuseError(DptuneError):
    """Raised if a user arrives a second time: the guarantee is for users who are in one update."""


class UserRegister:
    """Numbers of all users who were in an update of a run. Private."""

    def __init__(self) -> None:
        self._users: set[int] = set()

    def admit(self, users: tuple[int, ...]) -> None:
        """Add the users of one update. Raises: UserReuseError naming the first who was in an update already."""
        for user in users:
            if user in self._users:
                raise UserReuseError(
                    f"user {user} is in a second update, and the guarantee is for users who are in one. "
                    "Fix: reset the environment for every user (continuing: false)."
                )
            self._users.add(user)
