------------------------------ MODULE Attempts ------------------------------
(* How often one run may be tried without progress (O30), and how often its  *)
(* restore (O4).  Owners have no names here: what counts is how an epoch     *)
(* ends.  `tries`, `idle` and `restores` are kept by the model itself and    *)
(* know nothing of `attempt`; the invariants compare.                        *)
EXTENDS Naturals
CONSTANTS
  Max,            \* max_attempts
  Forgives,       \* O30 progress starts the count again
  ForgivesMoved,  \* O30 also when the epoch ends by hand over or take back
  MovedCounts,    \* O30 hand over and take back add one; FALSE in the good ones
  GivenBackCounts,\* O30 give back adds one, as take over does
  SeizureCounts,  \* O4  a seizure from a dead seizer adds one
  OwnCount        \* O4  restores are counted apart; FALSE: on top of the run's attempts
VARIABLES st,       \* vacant, held, running; seized; over
          attempt, progress, owed,
          tries,    \* grants since the last progress, not counting those after a hand over
          fresh,    \* the next grant is one more try
          restores, \* seizures since the cancel
          end
vars == <<st, attempt, progress, owed, tries, fresh, restores, end>>
Init == /\ st = "vacant" /\ attempt = 0 /\ progress = FALSE /\ owed = FALSE
        /\ tries = 0 /\ fresh = TRUE /\ restores = 0 /\ end = "none"
Over(how) == st' = "over" /\ end' = how

Claim == /\ st = "vacant" /\ ~owed /\ st' = "held" /\ attempt' = (IF attempt = 0 THEN 1 ELSE attempt) /\ progress' = FALSE
         /\ tries' = (IF fresh THEN tries + 1 ELSE tries) /\ fresh' = FALSE /\ UNCHANGED <<owed, restores, end>>
Start == st = "held" /\ ~owed /\ st' = "running" /\ UNCHANGED <<attempt, progress, owed, tries, fresh, restores, end>>
\* a checkpoint of this epoch: whatever comes next starts from there
Write == /\ st = "running" /\ ~owed /\ progress' = TRUE /\ tries' = 0
         /\ UNCHANGED <<st, attempt, owed, fresh, restores, end>>
Next1 == IF progress /\ Forgives THEN 1 ELSE attempt + 1
Lose(counts) ==
    /\ st \in {"held", "running"} /\ ~owed /\ fresh' = TRUE
    /\ IF counts /\ Next1 > Max
       THEN Over("poison") /\ UNCHANGED <<attempt, progress>>
       ELSE st' = "vacant" /\ attempt' = (IF counts THEN Next1 ELSE attempt) /\ progress' = FALSE /\ UNCHANGED end
    /\ UNCHANGED <<owed, tries, restores>>
TakeOver == Lose(TRUE)
GiveBack == Lose(GivenBackCounts)
Moved == IF MovedCounts THEN attempt + 1 ELSE IF progress /\ ForgivesMoved THEN 1 ELSE attempt
\* after progress the next grant is the first try from the new checkpoint
HandOver == /\ st \in {"held", "running"} /\ ~owed
            /\ IF Moved > Max THEN Over("poison") /\ UNCHANGED <<attempt, progress, fresh>>
               ELSE st' = "vacant" /\ attempt' = Moved /\ progress' = FALSE /\ fresh' = (tries = 0) /\ UNCHANGED end
            /\ UNCHANGED <<owed, tries, restores>>
TakeBack == /\ st \in {"held", "running"} /\ ~owed /\ attempt' = (IF MovedCounts THEN attempt ELSE Moved)
            /\ progress' = FALSE /\ tries' = (IF tries = 0 THEN 1 ELSE tries)
            /\ UNCHANGED <<st, owed, fresh, restores, end>>
Success == st = "running" /\ ~owed /\ Over("success") /\ UNCHANGED <<attempt, progress, owed, tries, fresh, restores>>
\* a rollback of a run that has started
Cancel == st \in {"vacant", "held", "running"} /\ ~owed /\ attempt > 0 /\ owed' = TRUE
          /\ UNCHANGED <<st, attempt, progress, tries, fresh, restores, end>>
\* what it ends was no restore: the first seizure
First == /\ st # "seized" /\ st # "over" /\ owed /\ st' = "seized" /\ restores' = 1
         /\ attempt' = (IF OwnCount THEN 1 ELSE IF progress THEN 1 ELSE attempt + 1) /\ progress' = FALSE
         /\ UNCHANGED <<owed, tries, fresh, end>>
\* the seizer died, or did not come to an end within the grace; past the cap a seizer only settles
Again == /\ st = "seized" /\ attempt <= Max /\ restores' = restores + 1
         /\ attempt' = (IF SeizureCounts THEN attempt + 1 ELSE attempt)
         /\ UNCHANGED <<st, progress, owed, tries, fresh, end>>
Restore == st = "seized" /\ attempt <= Max /\ Over("interrupted") /\ UNCHANGED <<attempt, progress, owed, tries, fresh, restores>>
RollbackFailed == /\ st = "seized" /\ attempt > Max /\ Over("rollback_failed")
                  /\ UNCHANGED <<attempt, progress, owed, tries, fresh, restores>>
Next == Claim \/ Start \/ Write \/ TakeOver \/ GiveBack \/ HandOver \/ TakeBack \/ Success
        \/ Cancel \/ First \/ Again \/ Restore \/ RollbackFailed
Spec == Init /\ [][Next]_vars

\* no more grants without progress than the cap; a seizer past the cap does not restore, it settles
I9 == tries <= Max /\ restores <= Max + 1
\* ... and no fewer: who was deployed often, or came on every time, is not poison
I9Used == end = "poison" => tries = Max
\* a restore is given up only after it was tried as often
I16Tried == end = "rollback_failed" => restores > Max
I18 == [][HandOver => attempt' <= attempt]_vars
=============================================================================
