"""Where compiled kernels are kept between runs of the process."""

import os

from lingbot_map.folders import writable_folder


class CompileCacheError(ValueError):
    """A folder that cannot be used; the message says why."""


def use_compile_cache(folder: str) -> None:
    """
    Keep compiled code in `folder`, made if missing, instead of torch's temporary one; '' does not.

    To be called before the first compilation.

    :raises CompileCacheError: the folder cannot be made or written.
    """
    if not folder:
        return
    try:
        path = writable_folder(folder)
    except OSError as error:
        raise CompileCacheError(
            f"'compile_cache_dir' is '{folder}', where nothing can be written "
            f'({error.strerror}): choose another folder'
        ) from error
    os.environ['TORCHINDUCTOR_CACHE_DIR'] = str(path)
    os.environ['TRITON_CACHE_DIR'] = str(path / 'triton')
