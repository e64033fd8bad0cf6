"""Where compiled kernels are kept between runs of the process."""

import os

from lingbot_map.folders import writable_folder

_VARIABLES = ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')
_replaced: dict[str, str | None] = {}  # what these were before


class CompileCacheError(ValueError):
    """A folder that cannot be used; the message says why."""


def use_compile_cache(folder: str) -> None:
    """
    Keep compiled code in `folder`, made if missing, instead of torch's temporary one; '' does not.

    To be called before the first compilation.

    :raises CompileCacheError: the folder cannot be made or written.
    """
    if not folder:
        for name in list(_replaced):  # by a folder that was named earlier
            _set(name, _replaced.pop(name))
        return
    try:
        path = writable_folder(folder)
    except OSError as error:
        raise CompileCacheError(
            f"'compile_cache_dir' is '{folder}', where nothing can be written "
            f'({error.strerror}): choose another folder'
        ) from error
    for name, value in zip(_VARIABLES, (path, path / 'triton'), strict=True):
        _replaced.setdefault(name, os.environ.get(name))
        _set(name, str(value))


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
