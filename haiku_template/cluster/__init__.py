"""Joining the processes of one run, before JAX starts."""

from haiku_template.cluster.detection import LAUNCHERS as LAUNCHERS
from haiku_template.cluster.joining import HEARTBEATS as HEARTBEATS
from haiku_template.cluster.joining import asked as asked
from haiku_template.cluster.joining import ended as ended
from haiku_template.cluster.joining import is_joined as is_joined
from haiku_template.cluster.joining import join as join
from haiku_template.cluster.joining import leave as leave
from haiku_template.cluster.joining import lost as lost
from haiku_template.cluster.joining import watch as watch
from haiku_template.cluster.rendezvous import meet as meet
