"""The tests of this folder need Transformers, which `make test-frameworks` does not install."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("transformers") else ["test_trainer.py", "test_trainer_settings.py"]
