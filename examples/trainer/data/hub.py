"""The error message for a Hugging Face hub that cannot be reached."""

from examples.trainer.system.errors import UserError


def unreachable(what: str, error: Exception) -> UserError:
    """The error for a user who asked for something from the hub."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(
        f"cannot get {what} from the Hugging Face hub: {reason}. If there is no network here, "
        "train on files, as --data.paths FILES, or on the default text, both without "
        "--data.source; a tokenizer can be given as --data.tokenizer PATH/tokenizer.json."
    )
