------------------------------- MODULE Judge -------------------------------
(* A worker that is alive the whole time, a judge, and one database with any *)
(* number of outages and of forward steps of its clock.  Which rules never   *)
(* declare the live worker dead (the slow path of O24)?  Ages instead of     *)
(* instants, each counted no further than it matters.                        *)
EXTENDS Integers
CONSTANTS
  Lease, Grace,
  Gap,          \* longest time between two beats while the database answers
  Step,         \* by which the store's clock may jump; 0: never
  UseLooks,     \* O24 (b)
  UseHealthy    \* O24 (c)
VARIABLES up, left,     \* of the worker's lease by the store's clock
          owed,         \* time since which the worker owes a beat
          same, look,   \* the judge has seen the present beat, and for how long
          health,       \* how long the judge's own beats have been confirmed without a gap
          dead
vars == <<up, left, owed, same, look, health, dead>>
AtLeast(n, floor) == IF n > floor THEN n ELSE floor
AtMost(n, roof) == IF n < roof THEN n ELSE roof
Init == /\ up = TRUE /\ left = Lease /\ owed = 0 /\ same = TRUE /\ look = 0 /\ health = 0 /\ dead = FALSE
Tick == /\ (up => owed < Gap) /\ owed' = IF up THEN owed + 1 ELSE 0
        /\ left' = AtLeast(left - 1, -Grace) /\ look' = AtMost(look + 1, Lease)
        /\ health' = AtMost(health + 1, Lease + Grace) /\ UNCHANGED <<up, same, dead>>
Beat == /\ up /\ ~dead /\ owed > 0 /\ left' = Lease /\ owed' = 0 /\ same' = FALSE
        /\ UNCHANGED <<up, look, health, dead>>
Down == up /\ up' = FALSE /\ owed' = 0 /\ UNCHANGED <<left, same, look, health, dead>>
Up == ~up /\ up' = TRUE /\ health' = 0 /\ UNCHANGED <<left, owed, same, look, dead>>
Jump == Step > 0 /\ left' = AtLeast(left - Step, -Grace) /\ UNCHANGED <<up, owed, same, look, health, dead>>
Look == up /\ ~same /\ same' = TRUE /\ look' = 0 /\ UNCHANGED <<up, left, owed, health, dead>>
Declare == /\ up /\ ~dead
           /\ left <= -Grace                            \* O24 (a)
           /\ (UseLooks => same /\ look >= Lease)
           /\ (UseHealthy => health >= Lease + Grace)
           /\ dead' = TRUE /\ UNCHANGED <<up, left, owed, same, look, health>>
Next == Tick \/ Beat \/ Down \/ Up \/ Jump \/ Look \/ Declare
Spec == Init /\ [][Next]_vars
I13 == ~dead
=============================================================================
