"""How ranks talk: the Communicator Protocol, its two implementations, exact byte accounting and the phase clock."""

from gnnpar.comm.clock import PhaseClock
from gnnpar.comm.communicator import Communicator, Pending, Site
from gnnpar.comm.ledger import EpochTraffic, Ledger
from gnnpar.comm.mesh import Mesh
from gnnpar.comm.threads import ThreadWorld

__all__ = ["Communicator", "EpochTraffic", "Ledger", "Mesh", "Pending", "PhaseClock", "Site", "ThreadWorld"]
