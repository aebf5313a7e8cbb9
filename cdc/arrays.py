"""Names for the types of arrays."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

AnyArray: TypeAlias = Any
"""An Arrow array of any type. Unchecked: the type stubs that exist describe another version of Arrow."""

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
