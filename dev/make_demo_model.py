"""Make the model of demo-model/: the trained 28M hybrid, 4 bit, float32 scales.

    python dev/make_demo_model.py MODELS_FOLDER

MODELS_FOLDER holds py-qwen35-28m and LICENSE-PSF.txt. float32 scales and activations, because MLX's CPU kernels
multiply those about 9 times faster than bfloat16 ones (two cores); a GPU does not care.
"""

import shutil
import sys
from pathlib import Path

from mlx_lm.convert import convert

TARGET = Path(__file__).resolve().parent.parent / "demo-model" / "outcore_demo_model"

source = Path(sys.argv[1])
module = (TARGET / "__init__.py").read_text()
shutil.rmtree(TARGET)
convert(str(source / "py-qwen35-28m"), str(TARGET), quantize=True, q_bits=4, q_group_size=64, dtype="float32")
for name in ("model.safetensors.index.json", ".gitattributes"):
    (TARGET / name).unlink(missing_ok=True)
(TARGET / "README.md").unlink(missing_ok=True)
(TARGET / "__init__.py").write_text(module)
shutil.copy(source / "LICENSE-PSF.txt", TARGET.parent / "LICENSE-PSF.txt")
print(sum(f.stat().st_size for f in TARGET.iterdir()), "bytes in", TARGET)
