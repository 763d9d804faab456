"""DFlash for the embedded demo target: the recipe of configs/demo/dspine.py without injection.

Command:
    dspine-train configs/demo/dflash.py --set target=assets/demo/target --set data.path=assets/demo/data/train --set workdir=runs/demo_dflash
"""

import dataclasses
from pathlib import Path

from dspine_jax.config_io import load_config

dspine = load_config(Path(__file__).with_name("dspine.py"))
config = dataclasses.replace(dspine, workdir="runs/demo_dflash", drafter=dataclasses.replace(dspine.drafter, injection=None))
