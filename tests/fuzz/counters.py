"""What the fuzzed process tells its parent in shared memory, which a crash leaves as it is."""

import struct

COUNTERS = struct.Struct("<3Q")  # inputs that were executed, those that were accepted, findings
