# The four targets a newcomer needs. Python: the first of python3, python3.12, python3.11 that is 3.11 or 3.12; a .venv keeps the
# Python it was made with. Another one: rm -rf .venv; make setup PYTHON=/path/to/python3.12
PYTHON := $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && exit; done; echo python3)

.PHONY: setup demo test lint

setup:
	@$(PYTHON) deploy/setup_env.py

demo: setup
	@.venv/bin/python -m train.run configs/demo.yaml

test: setup
	.venv/bin/python -m pytest -n 2 --no-loadscope-reorder

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
