"""The server from which the processes of engines are forked imports this module when it starts."""

from tests.vllm.forked_processes import import_for_all

import_for_all()
