"""Print the requirements of a wheel, without torch and what needs it: requirements.py WHEEL"""

import re
import sys
from email.parser import BytesParser
from zipfile import ZipFile

HEAVY = {"torch", "transformers", "tokenizers"}

with ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = BytesParser().parsebytes(wheel.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    package = re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
    if "extra ==" not in requirement and package not in HEAVY:
        print(requirement)
