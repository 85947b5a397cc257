------------------------------- MODULE Young -------------------------------
(* Judge.tla with what makes recovery fast: a judge that has only just       *)
(* opened (O25) and a hint that the kernel releases when a worker is gone    *)
(* (O27).  An outage releases the hints of the living too.                   *)
EXTENDS Integers
CONSTANTS
  Lease, Grace, Gap, Step,
  FastLook,     \* how long a free hint and an unchanged beat must be seen: more than Gap
  EndsYouth,    \* O25 a judge whose own beats failed is young no more
  OwnLooks,     \* O25 its looks begin when it opens; FALSE: it takes over those of its predecessor
  FastHealthy   \* O27 rule (c) stays on the fast path
VARIABLES up, left, owed, same, look, health, young, held, dead
vars == <<up, left, owed, same, look, health, young, held, dead>>
AtLeast(n, floor) == IF n > floor THEN n ELSE floor
AtMost(n, roof) == IF n < roof THEN n ELSE roof
Init == /\ up = TRUE /\ left = Lease /\ owed = 0 /\ same = TRUE /\ look = 0 /\ health = 0
        /\ young = FALSE /\ held = TRUE /\ dead = FALSE
Tick == /\ (up => owed < Gap) /\ owed' = IF up THEN owed + 1 ELSE 0
        /\ left' = AtLeast(left - 1, -Grace) /\ look' = AtMost(look + 1, Lease)
        /\ health' = AtMost(health + 1, Lease + Grace) /\ UNCHANGED <<up, same, young, held, dead>>
\* a worker that lost its session connection reconnects, takes the hint again and beats
Beat == /\ up /\ ~dead /\ owed > 0 /\ left' = Lease /\ owed' = 0 /\ same' = FALSE /\ held' = TRUE
        /\ UNCHANGED <<up, look, health, young, dead>>
Down == /\ up /\ up' = FALSE /\ owed' = 0 /\ held' = FALSE
        /\ UNCHANGED <<left, same, look, health, young, dead>>
Up == /\ ~up /\ up' = TRUE /\ health' = 0 /\ young' = (young /\ ~EndsYouth)
      /\ UNCHANGED <<left, owed, same, look, held, dead>>
Opens == /\ up /\ health' = 0 /\ young' = TRUE
         /\ IF OwnLooks THEN same' = FALSE /\ look' = 0 ELSE UNCHANGED <<same, look>>
         /\ UNCHANGED <<up, left, owed, held, dead>>
Jump == /\ Step > 0 /\ left' = AtLeast(left - Step, -Grace)
        /\ UNCHANGED <<up, owed, same, look, health, young, held, dead>>
Look == /\ up /\ ~same /\ same' = TRUE /\ look' = 0
        /\ UNCHANGED <<up, left, owed, health, young, held, dead>>
Healthy == young \/ health >= Lease + Grace
Slow == Healthy /\ left <= -Grace /\ same /\ look >= Lease
Fast == (Healthy \/ ~FastHealthy) /\ ~held /\ same /\ look >= FastLook
Declare == /\ up /\ ~dead /\ (Slow \/ Fast) /\ dead' = TRUE
           /\ UNCHANGED <<up, left, owed, same, look, health, young, held>>
Next == Tick \/ Beat \/ Down \/ Up \/ Opens \/ Jump \/ Look \/ Declare
Spec == Init /\ [][Next]_vars
I13 == ~dead
=============================================================================
