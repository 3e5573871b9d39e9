"""Rewrites modules so that each function has its mutants beside it, as mutmut makes them; one is in force by $MUTANT_UNDER_TEST.

Usage, in the folder of the copy: python -m mutants_maker FILE...
"""

import sys
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents

if __name__ == "__main__":
    for name in sys.argv[1:]:
        module = Path(name)
        module.write_text(mutate_file_contents(name, module.read_text()).code)
