"""What pyproject.toml cannot say: where the project lives, and README with links that work elsewhere."""

import re
from pathlib import Path

from setuptools import setup

URL = None
"""Where the repository lives, such as ``https://host/owner/synkro``; None: nowhere yet.  README's links
lead to its branch ``main``."""

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
urls = {}
if URL is not None:
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{URL}/raw/main/", readme)
    readme = re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{URL}/blob/main/", readme)
    urls = {"Source": URL, "Changes": f"{URL}/blob/main/CHANGELOG.md"}

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
