"""Make the model of demo-model/: the trained 28M hybrid, 4 bit, float32 scales; and its drafter, 4 bit.

    python dev/make_demo_model.py MODELS_FOLDER DRAFTER_FOLDER

MODELS_FOLDER holds py-qwen35-28m and LICENSE-PSF.txt. float32 scales and activations, because MLX's CPU kernels
multiply those about 9 times faster than bfloat16 ones (two cores); a GPU does not care. DRAFTER_FOLDER is what
``outcore draft train`` made for py-qwen35-28m; dev/log/drafts.md tells how.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.pop(0)  # this folder has a numbers.py, and NumPy wants Python's

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.convert import convert

from outcore_drafters.train.network import Network, Shape

TARGET = Path(__file__).resolve().parent.parent / "demo-model" / "outcore_demo_model"

source = Path(sys.argv[1])
module = (TARGET / "__init__.py").read_text()
card = (TARGET / "drafter" / "README.md").read_text()
shutil.rmtree(TARGET)
convert(str(source / "py-qwen35-28m"), str(TARGET), quantize=True, q_bits=4, q_group_size=64, dtype="float32")
for name in ("model.safetensors.index.json", ".gitattributes"):
    (TARGET / name).unlink(missing_ok=True)
(TARGET / "README.md").unlink(missing_ok=True)
(TARGET / "__init__.py").write_text(module)
shutil.copy(source / "LICENSE-PSF.txt", TARGET.parent / "LICENSE-PSF.txt")

source, target = Path(sys.argv[2]), TARGET / "drafter"
config = json.loads((source / "config.json").read_text())
inner = config["transformer_layer_config"]
names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
net = Network(Shape(*(inner[name] for name in names), tapped=(0, 1, 2)), mx.ones(inner["hidden_size"]))
net.load_weights(str(source / "model.safetensors"))
net.set_dtype(mx.bfloat16)  # scales: with float32 ones it would be 1.6 MB; they are cast when it is loaded
nn.quantize(net, 64, 4)
target.mkdir()
net.save_weights(str(target / "model.safetensors"))
config["quantization"] = {"group_size": 64, "bits": 4}
(target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
(target / "README.md").write_text(card)
for folder in (TARGET, target):
    print(sum(f.stat().st_size for f in folder.iterdir()), "bytes in", folder)
